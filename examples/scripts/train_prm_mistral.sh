#!/usr/bin/env bash
# Trains a process reward model, which scores every step of a solution.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT.
set -euo pipefail

MODEL=${MODEL:-mistralai/Mistral-7B-v0.1}
DATASET=${DATASET:-zhuzilin/Math-Shepherd} # `input`: steps that end in ки; `value`: a list of + and -
OUT=${OUT:-ckpt/prm}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_prm \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --data.dataset "$DATASET" \
    --data.input_key input \
    --data.label_key value \
    --data.placeholder_token ки \
    --data.reward_tokens + - \
    --data.max_len 8192 \
    --train.batch_size 256 \
    --train.micro_batch_size 8 \
    --train.max_epochs 1 \
    --adam.lr 1e-6 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 200 \
    --ckpt.load_enable \
    "$@"
