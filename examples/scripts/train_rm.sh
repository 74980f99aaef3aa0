#!/usr/bin/env bash
# Trains a reward model on pairs of answers.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT, with the mean and standard deviation of its rewards in config.json.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATASET=${DATASET:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
OUT=${OUT:-ckpt/rm}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_rm \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --data.dataset "$DATASET" \
    --data.chosen_key chosen \
    --data.rejected_key rejected \
    --data.apply_chat_template \
    --data.max_len 8192 \
    --train.batch_size 256 \
    --train.micro_batch_size 1 \
    --train.max_epochs 1 \
    --adam.lr 9e-6 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 200 \
    --ckpt.load_enable \
    "$@"
