#!/usr/bin/env bash
# Iterative DPO. Each iteration generates answers to new prompts with the previous model, selects the best and
# the worst answer to each with a reward model, and trains on these pairs with the previous model as reference.
# Needs 8 GPUs of 80 GB. Writes $OUT/iterN/model. Run it again to continue after a stop.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
PROMPTS=${PROMPTS:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-ckpt/iterative_dpo}
ITERATIONS=${ITERATIONS:-5}
ROLLOUT_BATCH=${ROLLOUT_BATCH:-10240} # prompts per iteration
BEST_OF_N=${BEST_OF_N:-8}             # answers per prompt
LAUNCH=${LAUNCH:-deepspeed --module}  # for scoring and training; generation is one process
GENERATE_FLAGS=${GENERATE_FLAGS:-}    # more flags, without spaces in their values
SCORE_FLAGS=${SCORE_FLAGS:-}
TRAIN_FLAGS=${TRAIN_FLAGS:-}

POLICY=$MODEL
for ((i = 0; i < ITERATIONS; i++)); do
    DIR=$OUT/iter$i
    if [[ ! -e $DIR/done ]]; then
        mkdir -p "$DIR"
        echo "== iteration $i of $ITERATIONS, with $POLICY"
        python -m openrlhf.cli.batch_inference \
            --task generate_vllm \
            --model.model_name_or_path "$POLICY" \
            --data.dataset "$PROMPTS" \
            --data.input_key "$INPUT_KEY" \
            --data.apply_chat_template \
            --data.bad_rows skip \
            --iter "$i" \
            --rollout.batch_size "$ROLLOUT_BATCH" \
            --rollout.n_samples_per_prompt "$BEST_OF_N" \
            --rollout.max_new_tokens 2048 \
            --output_path "$DIR/answers.jsonl" \
            $GENERATE_FLAGS
        $LAUNCH openrlhf.cli.batch_inference \
            --task rm \
            --model.model_name_or_path "$REWARD_MODEL" \
            --data.dataset "$DIR/answers.jsonl" \
            --data.apply_chat_template \
            --data.max_len 4096 \
            --post_processor iter_dpo \
            --output_path "$DIR/pairs.jsonl" \
            $SCORE_FLAGS
        $LAUNCH openrlhf.cli.train_dpo \
            --model.model_name_or_path "$POLICY" \
            --model.gradient_checkpointing_enable \
            --model.beta 0.1 \
            --ref.model_name_or_path "$POLICY" \
            --data.dataset "$DIR/pairs.jsonl" \
            --data.prompt_key prompt \
            --data.chosen_key chosen \
            --data.rejected_key rejected \
            --data.apply_chat_template \
            --data.max_len 4096 \
            --train.batch_size 128 \
            --train.micro_batch_size 1 \
            --train.max_epochs 1 \
            --adam.lr 5e-7 \
            --ds.zero_stage 3 \
            --ckpt.output_dir "$DIR/model" \
            --ckpt.overwrite \
            --ckpt.path "$DIR/checkpoints" \
            $TRAIN_FLAGS
        touch "$DIR/done"
    fi
    POLICY=$DIR/model
done
echo "trained model: $POLICY"
