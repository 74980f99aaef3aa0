#!/usr/bin/env bash
# Knowledge distillation: an 8B student imitates a 70B teacher on given answers.
# Needs 8 GPUs of 80 GB and 256 GB of CPU memory for the teacher. Writes the student to $OUT.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
TEACHER=${TEACHER:-meta-llama/Meta-Llama-3-70B-Instruct} # must have the student's vocabulary
DATASET=${DATASET:-Open-Orca/OpenOrca}
OUT=${OUT:-ckpt/kd}
LAUNCH=${LAUNCH:-deepspeed --module}

$LAUNCH openrlhf.cli.train_kd \
    --model.model_name_or_path "$MODEL" \
    --model.gradient_checkpointing_enable \
    --model.kd_coef 0.4 \
    --teacher.model_name_or_path "$TEACHER" \
    --teacher.offload \
    --data.dataset "$DATASET" \
    --data.input_key question \
    --data.output_key response \
    --data.apply_chat_template \
    --data.max_len 4096 \
    --data.max_samples 500000 \
    --train.batch_size 256 \
    --train.micro_batch_size 2 \
    --train.max_epochs 1 \
    --adam.lr 5e-6 \
    --ds.zero_stage 3 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 500 \
    --ckpt.load_enable \
    "$@"
