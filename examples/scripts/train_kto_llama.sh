#!/usr/bin/env bash
# KTO: trains a policy on single answers labelled good or bad.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture} # also the reference
DATASET=${DATASET:-argilla/ultrafeedback-binarized-preferences-cleaned-kto}
OUT=${OUT:-ckpt/kto}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_kto \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --model.beta 0.1 \
    --data.dataset "$DATASET" \
    --data.input_key prompt \
    --data.output_key completion \
    --data.label_key label \
    --data.apply_chat_template \
    --data.max_len 2048 \
    --train.batch_size 64 \
    --train.micro_batch_size 1 \
    --train.max_epochs 1 \
    --adam.lr 5e-7 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 500 \
    --ckpt.load_enable \
    "$@"
