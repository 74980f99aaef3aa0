#!/usr/bin/env bash
# Supervised fine-tuning on prompts and responses.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B}
DATASET=${DATASET:-Open-Orca/OpenOrca}
OUT=${OUT:-ckpt/sft}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_sft \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --data.dataset "$DATASET" \
    --data.input_key question \
    --data.output_key response \
    --data.input_template $'User: {}\nAssistant: ' \
    --data.max_len 2048 \
    --data.max_samples 500000 \
    --train.batch_size 256 \
    --train.micro_batch_size 2 \
    --train.max_epochs 1 \
    --adam.lr 5e-6 \
    --ds.zero_stage 2 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 500 \
    --ckpt.load_enable \
    "$@"
