#!/usr/bin/env bash
# REINFORCE++-baseline with an agent and asynchronous training: half of the GPUs train, the other half sample
# the next batch. A weight sync pauses episodes instead of waiting for them.
# Needs 8 GPUs of 80 GB, and a .py file with the class AgentExecutor. Writes the policy to $OUT.
set -euo pipefail

AGENT=${AGENT:?name a .py file with the class AgentExecutor}
MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
PROMPTS=${PROMPTS:-agentica-org/DeepScaleR-Preview-Dataset}
OUT=${OUT:-ckpt/reinforce_agent_async}
TRAIN_GPUS=${TRAIN_GPUS:-4}
ENGINES=${ENGINES:-4}

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node "$TRAIN_GPUS" \
    --actor.gradient_checkpointing_enable \
    --actor.adam.lr 5e-7 \
    --actor.entropy_coef 0 \
    --train.agent_func_path "$AGENT" \
    --data.prompt_dataset "$PROMPTS" \
    --data.input_key problem \
    --data.label_key answer \
    --data.apply_chat_template \
    --data.max_len 74240 \
    --rollout.batch_size 128 \
    --rollout.n_samples_per_prompt 8 \
    --vllm.num_engines "$ENGINES" \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization 0.95 \
    --train.colocate_actor_ref \
    --train.async_enable \
    --train.async_queue_size 1 \
    --train.partial_rollout_enable \
    --train.batch_size 1024 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 37120 \
    --algo.advantage.estimator reinforce_baseline \
    --algo.advantage.is_correction_enable \
    --algo.advantage.is_correction_type icepop \
    --algo.kl.use_loss \
    --algo.kl.estimator k2 \
    --algo.kl.init_coef 1e-5 \
    --ds.zero_stage 3 \
    --ds.ring_attn_size 2 \
    --ds.ring_attn_head_stride 2 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 10 \
    --ckpt.load_enable \
    "$@"
