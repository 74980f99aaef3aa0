#!/usr/bin/env bash
# DPO: trains a policy on pairs of answers, without a reward model.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture} # also the reference
DATASET=${DATASET:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
OUT=${OUT:-ckpt/dpo}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_dpo \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --model.beta 0.1 \
    --data.dataset "$DATASET" \
    --data.chosen_key chosen \
    --data.rejected_key rejected \
    --data.apply_chat_template \
    --data.max_len 8192 \
    --train.batch_size 256 \
    --train.micro_batch_size 1 \
    --train.max_epochs 1 \
    --adam.lr 5e-7 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 200 \
    --ckpt.load_enable \
    "$@"
