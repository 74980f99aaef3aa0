#!/usr/bin/env bash
# REINFORCE++-baseline with an agent: episodes of several turns and up to 74k tokens, each sequence split over
# two GPUs (sequence parallelism).
# Needs 8 GPUs of 80 GB, and a .py file with the class AgentExecutor. Writes the policy to $OUT.
set -euo pipefail

AGENT=${AGENT:?name a .py file with the class AgentExecutor}
MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
PROMPTS=${PROMPTS:-agentica-org/DeepScaleR-Preview-Dataset}
OUT=${OUT:-ckpt/reinforce_agent}
NODES=${NODES:-1}
GPUS=${GPUS:-8} # per node

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --actor.num_nodes "$NODES" \
    --actor.num_gpus_per_node "$GPUS" \
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
    --vllm.num_engines $((NODES * GPUS)) \
    --vllm.tensor_parallel_size 1 \
    --vllm.gpu_memory_utilization 0.7 \
    --vllm.enable_sleep \
    --train.colocate_all \
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
    --ds.enable_sleep \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps 10 \
    --ckpt.load_enable \
    "$@"
