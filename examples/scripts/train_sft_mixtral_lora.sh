#!/usr/bin/env bash
# LoRA fine-tuning of a mixture of experts, with a load-balancing loss for its experts.
# Needs 8 GPUs of 80 GB. Writes the adapter to $OUT; `openrlhf lora_combiner` merges it into the model.
set -euo pipefail

MODEL=${MODEL:-mistralai/Mixtral-8x7B-v0.1}
DATASET=${DATASET:-Open-Orca/OpenOrca}
OUT=${OUT:-ckpt/sft_mixtral_lora}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_sft \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --model.aux_loss_coef 0.001 \
    --data.dataset "$DATASET" \
    --data.input_key question \
    --data.output_key response \
    --data.input_template $'User: {}\nAssistant: ' \
    --data.max_len 2048 \
    --data.max_samples 500000 \
    --train.batch_size 128 \
    --train.micro_batch_size 4 \
    --train.max_epochs 1 \
    --adam.lr 5e-6 \
    --ds.zero_stage 3 \
    --ds.lora.rank 64 \
    --ds.lora.alpha 64 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 500 \
    --ckpt.load_enable \
    "$@"
