#!/usr/bin/env bash
# Supervised fine-tuning of a vision-language model on geometry problems with a picture. The visual encoder
# is frozen.
# Needs 8 GPUs of 80 GB. Writes the model to $OUT.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATASET=${DATASET:-hiyouga/geometry3k}
OUT=${OUT:-ckpt/sft_vlm}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_sft \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --model.freeze_visual_encoder \
    --data.dataset "$DATASET" \
    --data.input_key problem \
    --data.output_key answer \
    --data.image_key images \
    --data.max_images_per_prompt 1 \
    --data.bad_rows skip \
    --data.apply_chat_template \
    --data.max_len 2048 \
    --train.batch_size 128 \
    --train.micro_batch_size 2 \
    --train.max_epochs 2 \
    --adam.lr 5e-6 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 100 \
    --ckpt.load_enable \
    "$@"
