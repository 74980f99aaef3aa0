#!/usr/bin/env bash
# Trains a tiny vision-language model to name the colours of four squares, without a download: SFT on some of
# the answers, then RL with a reward function. Only the pictures contain the answers.
# Needs 2 cores and 8 GB. Writes everything to $OUT. Flags appended to the script apply to RL.
set -euo pipefail

OUT=${OUT:-pictures}
REWARD=${REWARD:-$(dirname "$0")/../../openrlhf/tasks/picture_reward.py}

python -m openrlhf.tasks.prepare_pictures "$OUT"

python -m openrlhf.cli.train_sft \
    --model.model_name_or_path "$OUT/model" \
    --data.dataset "$OUT/sft.jsonl" \
    --data.output_key output \
    --data.max_images_per_prompt 1 \
    --data.apply_chat_template \
    --data.max_len 96 \
    --data.max_samples 768 \
    --train.batch_size 32 \
    --train.micro_batch_size 32 \
    --train.max_epochs 2 \
    --adam.lr 4e-3 \
    --ds.zero_stage 0 \
    --ds.param_dtype fp32 \
    --ckpt.output_dir "$OUT/sft"

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$OUT/sft" \
    --actor.num_gpus_per_node 1 \
    --train.colocate_all \
    --data.prompt_dataset "$OUT/prompts.jsonl" \
    --data.label_key label \
    --data.max_images_per_prompt 1 \
    --data.apply_chat_template \
    --data.max_len 96 \
    --reward.remote_url "$REWARD" \
    --algo.advantage.estimator group_norm \
    --algo.kl.init_coef 0 \
    --rollout.batch_size 32 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 12 \
    --train.batch_size 256 \
    --train.micro_batch_size 64 \
    --train.max_steps 30 \
    --actor.adam.lr 5e-4 \
    --actor.lr_scheduler constant \
    --eval.dataset "$OUT/eval.jsonl" \
    --eval.steps 10 \
    --eval.n_samples_per_prompt 1 \
    --ds.param_dtype fp32 \
    --ckpt.output_dir "$OUT/policy" \
    "$@"
