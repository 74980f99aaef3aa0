#!/usr/bin/env bash
# Conditional SFT. A reward model scores answers, and each score is inserted into the prompt of its answer. A
# model trained on these rows generates better answers if the prompt contains a high score.
# Needs 8 GPUs of 80 GB. Writes $OUT/model, and its answers to $PROMPTS with a high score in the prompt to
# $OUT/answers.jsonl. Run it again to continue after a stop.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
DATASET=${DATASET:-Open-Orca/OpenOrca} # prompts and answers, as text
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}
MAX_SAMPLES=${MAX_SAMPLES:-128000}
PROMPTS=${PROMPTS:-$DATASET}
NUM_PROMPTS=${NUM_PROMPTS:-1024}
ASK=${ASK:-<rm_score>: 2.00} # two standard deviations above the mean answer
OUT=${OUT:-ckpt/conditional}
LAUNCH=${LAUNCH:-deepspeed --module} # for scoring and training; generation is one process
GENERATE_FLAGS=${GENERATE_FLAGS:-}   # more flags, without spaces in their values
SCORE_FLAGS=${SCORE_FLAGS:-}
TRAIN_FLAGS=${TRAIN_FLAGS:-}

mkdir -p "$OUT"
if [[ ! -e $OUT/done ]]; then
    $LAUNCH openrlhf.cli.batch_inference \
        --task rm \
        --model.model_name_or_path "$REWARD_MODEL" \
        --data.dataset "$DATASET" \
        --data.input_key "$INPUT_KEY" \
        --data.output_key "$OUTPUT_KEY" \
        --data.apply_chat_template \
        --data.max_len 2048 \
        --data.max_samples "$MAX_SAMPLES" \
        --post_processor csft \
        --reward.normalize_enable \
        --output_path "$OUT/scored.jsonl" \
        $SCORE_FLAGS
    $LAUNCH openrlhf.cli.train_sft \
        --model.model_name_or_path "$MODEL" \
        --model.gradient_checkpointing_enable \
        --data.dataset "$OUT/scored.jsonl" \
        --data.input_key input \
        --data.output_key output \
        --data.apply_chat_template \
        --data.max_len 2048 \
        --train.batch_size 128 \
        --train.micro_batch_size 2 \
        --train.max_epochs 1 \
        --adam.lr 5e-6 \
        --ds.zero_stage 3 \
        --ckpt.output_dir "$OUT/model" \
        --ckpt.overwrite \
        --ckpt.path "$OUT/checkpoints" \
        $TRAIN_FLAGS
    touch "$OUT/done"
fi
python -m openrlhf.cli.batch_inference \
    --task generate_vllm \
    --model.model_name_or_path "$OUT/model" \
    --data.dataset "$PROMPTS" \
    --data.input_key "$INPUT_KEY" \
    --data.max_samples "$NUM_PROMPTS" \
    --data.apply_chat_template \
    --csft.enable \
    --csft.prompt "$ASK" \
    --rollout.max_new_tokens 1024 \
    --output_path "$OUT/answers.jsonl" \
    $GENERATE_FLAGS
