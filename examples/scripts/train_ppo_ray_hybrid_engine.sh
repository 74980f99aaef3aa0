#!/usr/bin/env bash
# PPO with a critic and a reward model; all models and the vLLM engines share the same GPUs.
# Needs 8 GPUs of 80 GB. Writes the policy to $OUT.
# For more nodes set NODES=2 on a Ray cluster of two nodes, or use train_ppo_ray_slurm.sh.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k} # also initializes the critic
PROMPTS=${PROMPTS:-OpenRLHF/prompt-collection-v0.1}
OUT=${OUT:-ckpt/ppo}
NODES=${NODES:-1}
GPUS=${GPUS:-8} # per node

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes "$NODES" \
    --actor.num_gpus_per_node "$GPUS" \
    --actor.gradient_checkpointing_enable \
    --actor.adam.lr 5e-7 \
    --critic.adam.lr 9e-6 \
    --reward.model_name_or_path "$REWARD_MODEL" \
    --reward.normalize_enable \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key context_messages \
    --data.apply_chat_template \
    --data.max_len 2048 \
    --data.max_samples 100000 \
    --rollout.batch_size 1024 \
    --rollout.n_samples_per_prompt 1 \
    --rollout.max_new_tokens 1024 \
    --vllm.num_engines $((NODES * GPUS / 2)) \
    --vllm.tensor_parallel_size 2 \
    --vllm.gpu_memory_utilization 0.5 \
    --vllm.enable_sleep \
    --vllm.enforce_eager \
    --train.colocate_all \
    --train.batch_size 128 \
    --train.max_epochs 1 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 16384 \
    --algo.advantage.estimator gae \
    --algo.advantage.is_correction_enable \
    --algo.kl.init_coef 0.01 \
    --ds.zero_stage 3 \
    --ds.enable_sleep \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 20 \
    --ckpt.load_enable \
    "$@"
