#!/usr/bin/env bash
# ProRL v2: long reasoning in mathematics with REINFORCE++-baseline. Tokens with too large a mismatch between
# sampler and trainer are masked (ICEPOP), and truncated answers get no reward.
# Needs 8 GPUs of 80 GB. Writes the policy to $OUT.
set -euo pipefail

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
PROMPTS=${PROMPTS:-agentica-org/DeepScaleR-Preview-Dataset}
EVAL=${EVAL:-HuggingFaceH4/aime_2024}
REWARD=${REWARD:-$EXAMPLES/python/math_reward_func.py}
OUT=${OUT:-ckpt/prorlv2}
NODES=${NODES:-1}
GPUS=${GPUS:-8} # per node

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes "$NODES" \
    --actor.num_gpus_per_node "$GPUS" \
    --actor.gradient_checkpointing_enable \
    --actor.adam.lr 5e-7 \
    --actor.eps_clip_low_high 0.2 0.27 \
    --reward.remote_url "$REWARD" \
    --reward.stop_properly_penalty_coef 0 \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key problem \
    --data.label_key answer \
    --data.apply_chat_template \
    --data.max_len 9216 \
    --rollout.batch_size 512 \
    --rollout.n_samples_per_prompt 16 \
    --rollout.max_new_tokens 8192 \
    --vllm.num_engines $((NODES * GPUS)) \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization 0.6 \
    --vllm.enable_sleep \
    --train.colocate_all \
    --train.batch_size 1024 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 32768 \
    --algo.advantage.estimator reinforce_baseline \
    --algo.advantage.is_correction_enable \
    --algo.advantage.is_correction_type icepop \
    --algo.advantage.is_correction_threshold 0.5 5.0 \
    --algo.dynamic_filtering_enable \
    --algo.dynamic_filtering_range 0 1 \
    --algo.kl.use_loss \
    --algo.kl.estimator k2 \
    --algo.kl.init_coef 1e-4 \
    --eval.dataset "$EVAL" \
    --eval.steps 10 \
    --eval.temperature 0.6 \
    --eval.n_samples_per_prompt 16 \
    --ds.zero_stage 3 \
    --ds.enable_sleep \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 10 \
    --ckpt.load_enable \
    "$@"
