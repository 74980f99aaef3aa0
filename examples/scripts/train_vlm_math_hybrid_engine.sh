#!/usr/bin/env bash
# REINFORCE++-baseline of a vision-language model on geometry problems with a picture. The visual encoder
# is frozen.
# Needs 8 GPUs of 80 GB. Writes the policy to $OUT.
set -euo pipefail

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODEL=${MODEL:-Qwen/Qwen3.5-4B}
PROMPTS=${PROMPTS:-hiyouga/geometry3k}
REWARD=${REWARD:-$EXAMPLES/python/math_reward_func.py}
OUT=${OUT:-ckpt/vlm_math}
NODES=${NODES:-1}
GPUS=${GPUS:-8} # per node

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes "$NODES" \
    --actor.num_gpus_per_node "$GPUS" \
    --actor.gradient_checkpointing_enable \
    --actor.freeze_visual_encoder \
    --actor.adam.lr 2e-6 \
    --reward.remote_url "$REWARD" \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key problem \
    --data.label_key answer \
    --data.image_key images \
    --data.max_images_per_prompt 1 \
    --data.apply_chat_template \
    --data.max_len 4096 \
    --rollout.batch_size 128 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 2048 \
    --vllm.num_engines $((NODES * GPUS)) \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization 0.5 \
    --vllm.enable_sleep \
    --train.colocate_all \
    --train.batch_size 128 \
    --train.micro_batch_size 1 \
    --algo.advantage.estimator reinforce_baseline \
    --algo.kl.init_coef 0 \
    --ds.zero_stage 3 \
    --ds.enable_sleep \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 20 \
    --ckpt.load_enable \
    "$@"
