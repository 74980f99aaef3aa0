"""Checks between flags: what is refused, what is remarked, and what follows from several flags."""

import ast
import dataclasses
import inspect
import math
import time
from pathlib import Path

import pytest
from command_lines import problems_of

from openrlhf.config import checks, ppo_checks, supervised_checks
from openrlhf.config.checks import optimizer_ignored, sequence_parallel
from openrlhf.config.commands import (
    COMMANDS,
    DPO,
    KD,
    KTO,
    PPO,
    PRM,
    RM,
    SERVE_RM,
    SFT,
)
from openrlhf.config.fields import flag_values, to_words
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig, is_due
from openrlhf.config.supervised import DPOConfig
from openrlhf.mesh import Mesh

# ---- what is wrong between flags

ONE_GPU = "--actor.num_gpus_per_node 1 "
GROUP = "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator "
GSPO = "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 "
SKIP = "--algo.skip_old_log_probs --train.batch_size 1024 "
IS = "--algo.advantage.is_correction_"
LEVEL = f"{IS}level"
SAPO = f"{Path(__file__).parents[3]}/examples/python/sapo.py:SAPO"
CENTERED, ONE_STEP = "--algo.advantage.score_centering_top_k 32", "--train.force_on_policy"
SAMPLER = "--algo.kl.ref rollout --algo.kl.use_loss --algo.kl.estimator k3"
CRITIC = "--algo.advantage.estimator gae"
WITH_IMAGES = "--data.max_images_per_prompt 1 --data.apply_chat_template"
FILTER = "--rollout.n_samples_per_prompt 8 --algo.dynamic_filtering_enable "

CHECKS = [
    (
        SFT,
        "--model.aux_loss_coef 0.1 --model.gradient_checkpointing_enable "
        "--model.gradient_checkpointing_reentrant",
        "unsupported",
        "--model.gradient_checkpointing_reentrant",
        "model.aux_loss_coef",
    ),
    (PPO, "--train.force_on_policy --train.max_epochs 2", "conflict", "--train.max_epochs 2", "use 1"),
    (
        PPO,
        "--train.force_on_policy --rollout.batch_size 3 --actor.num_gpus_per_node 2",
        "conflict",
        "--rollout.batch_size 3",
        "3 is not a multiple of the 2 data-parallel ranks",
    ),
    (PPO, "--eval.eval_only", "missing-flag", "--eval.eval_only", "--eval.dataset"),
    (
        PPO,
        "--eval.dataset org/rows --eval.steps 1 --eval.max_new_tokens 64 --data.max_len 64",
        "conflict",
        "--eval.max_new_tokens 64",
        "raise data.max_len",
    ),
    (SFT, "--ds.deepcompile", "unsupported", "--ds.deepcompile", "remove it"),
    (
        PPO,
        "--train.shuffle group --train.batch_size 4 --rollout.batch_size 8 --rollout.n_samples_per_prompt 8",
        "conflict",
        "--train.shuffle group",
        "raise train.batch_size 4",
    ),
    (
        PPO,
        "--train.partial_rollout_enable",
        "conflict",
        "--train.partial_rollout_enable",
        "--train.async_enable",
    ),
    # backend
    (SFT, "--train.backend torch --ds.zero_stage 1", "unsupported", "--ds.zero_stage 1", "use 2 or 3"),
    (PPO, "--train.backend torch --ds.param_dtype fp16", "unsupported", "--ds.param_dtype fp16", ""),
    (
        PPO,
        "--train.backend torch --ds.grad_accum_dtype bf16",
        "unsupported",
        "--ds.grad_accum_dtype bf16",
        "",
    ),
    (
        SFT,
        "--train.backend torch --ds.tensor_parallel_size 2",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "use 1",
    ),
    (SFT, "--train.backend torch --ds.ring_attn_size 2", "unsupported", "--ds.ring_attn_size 2", "use 1"),
    (SFT, "--train.backend torch --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (SFT, "--train.backend torch --ds.load_in_4bit", "unsupported", "--ds.load_in_4bit", ""),
    (SFT, "--train.backend torch --ds.use_universal_ckpt", "unsupported", "--ds.use_universal_ckpt", ""),
    (SFT, "--train.backend torch --optim muon --max_norm 0", "unsupported", "--optim muon", ""),
    (PPO, "--train.backend torch --critic.optim muon", "unsupported", "--critic.optim muon", ""),
    (PPO, "--train.backend torch --train.enable_ema", "unsupported", "--train.enable_ema", ""),
    (
        PPO,
        "--train.backend torch --actor.gradient_checkpointing_reentrant",
        "unsupported",
        "--actor.gradient_checkpointing_reentrant",
        "",
    ),
    (DPO, "--train.backend torch --ref.offload", "unsupported", "--ref.offload", ""),
    # placement
    (
        PPO,
        "--placement auto --train.colocate_all false",
        "conflict",
        "--train.colocate_all false",
        "--placement",
    ),
    # paths
    (SFT, "--model.model_name_or_path ./nothing", "not-found", "--model.model_name_or_path ./nothing", ""),
    (SFT, "--model.model_name_or_path ~/m", "not-found", "--model.model_name_or_path ~/m", ""),
    (SFT, "--data.dataset /no/such/rows", "not-found", "--data.dataset /no/such/rows", ""),
    (SFT, "--data.dataset org/a,rewar.py", "not-found", "--data.dataset org/a,rewar.py", "reward.py"),
    (SFT, "--data.dataset rows.jsonl@part", "not-found", "--data.dataset rows.jsonl@part", ""),
    (SFT, "--eval.dataset ./x.json --data.max_len 7", "not-found", "--eval.dataset ./x.json", ""),
    (SFT, "--ckpt.output_dir reward.py", "not-writable", "--ckpt.output_dir reward.py", ""),
    (PPO, "--reward.remote_url rewards.py", "not-found", "--reward.remote_url rewards.py", "reward.py"),
    (PPO, "--reward.remote_url reward", "invalid-value", "--reward.remote_url reward", ""),
    (
        PPO,
        "--reward.remote_url reward.py,reward.py",
        "invalid-value",
        "--reward.remote_url reward.py,reward.py",
        "",
    ),
    (PPO, "--reward.remote_url None", "missing-flag", "--reward.remote_url", "--reward.model_name_or_path"),
    # data
    (SFT, "--data.dataset_probs 0.5,0.5", "conflict", "--data.dataset_probs 0.5,0.5", ""),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs 0.5,0.6",
        "invalid-value",
        "--data.dataset_probs 0.5,0.6",
        "0.4545,0.5455",
    ),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs half,half",
        "invalid-value",
        "--data.dataset_probs half,half",
        "",
    ),
    (PPO, "--data.prompt_probs 1,0", "conflict", "--data.prompt_probs 1,0", ""),
    (SFT, "--data.input_template hello", "invalid-value", "--data.input_template hello", ""),
    (PPO, "--data.input_template {a}", "invalid-value", "--data.input_template {a}", ""),
    (PPO, "--data.input_template reward.py", "invalid-value", "--data.input_template reward.py", "$(cat"),
    (SFT, "--data.multiturn", "conflict", "--data.multiturn", "--data.apply_chat_template"),
    (
        SFT,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        RM,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        DPO,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        PPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --ds.use_liger_kernel",
        "unsupported",
        "--ds.use_liger_kernel",
        "--data.max_images_per_prompt",
    ),
    (
        SFT,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --model.pretrain_mode_enable",
        "conflict",
        "--data.max_images_per_prompt 1",
        "",
    ),
    (
        DPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_root missing",
        "not-found",
        "--data.image_root missing",
        "",
    ),
    (
        RM,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_hosts a.org https://b.org",
        "invalid-value",
        "--data.image_hosts a.org https://b.org",
        "",
    ),
    (
        SFT,
        "--data.output_key None --data.multiturn --model.pretrain_mode_enable",
        "conflict",
        "--data.multiturn",
        "",
    ),
    (SFT, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (KTO, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (KD, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (PRM, ["--data.placeholder_token", ""], "missing-flag", "--data.placeholder_token", ""),
    (PRM, "--data.reward_tokens +", "invalid-value", "--data.reward_tokens +", ""),
    (PRM, "--data.reward_tokens + - +", "invalid-value", "--data.reward_tokens + - +", ""),
    # models
    (KD, "--teacher.model_name_or_path ./t", "not-found", "--teacher.model_name_or_path ./t", ""),
    (KD, ["--teacher.model_name_or_path", ""], "missing-flag", "--teacher.model_name_or_path", ""),
    (DPO, "--ref.model_name_or_path ./r", "not-found", "--ref.model_name_or_path ./r", ""),
    (KTO, "--ref.model_name_or_path ./r", "not-found", "--ref.model_name_or_path ./r", ""),
    # batches
    (RM, "--train.batch_size 0", "invalid-value", "--train.batch_size 0", ""),
    (SFT, "--train.batch_size 36", "conflict", "--train.batch_size 36", "use 32 or 40"),
    (PPO, "--train.batch_size 100", "conflict", "--train.batch_size 100", "use 64 or 128"),
    (PPO, "--train.batch_size 4", "conflict", "--train.batch_size 4", "use 8"),
    (PPO, "--train.batch_size 2048", "conflict", "--train.batch_size 2048", "use 1024"),
    (PPO, "--rollout.batch_size 7 --train.batch_size 7", "conflict", "--train.batch_size 7", ""),
    (PPO, "--train.micro_batch_size 3", "conflict", "--train.batch_size 128 (default)", "use 16"),
    (PPO, "--rollout.max_new_tokens 2048", "conflict", "--rollout.max_new_tokens 2048", ""),
    # engines
    (
        PPO,
        "--ds.lora.rank 1024 --vllm.lora_sync adapter",
        "unsupported",
        "--vllm.lora_sync adapter",
        "ds.lora.rank",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --ds.lora.rank 8 --vllm.lora_sync adapter",
        "unsupported",
        "--vllm.lora_sync adapter",
        "",
    ),
    (PPO, "--algo.router_replay", "conflict", "--algo.router_replay", "--vllm.enable_prefix_caching"),
    (
        PPO,
        "--algo.router_replay --vllm.enable_prefix_caching --vllm.pipeline_parallel_size 2",
        "unsupported",
        "--algo.router_replay",
        "--vllm.pipeline_parallel_size",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --algo.router_replay --vllm.enable_prefix_caching",
        "unsupported",
        "--algo.router_replay",
        "data.max_images_per_prompt",
    ),
    (PPO, "--vllm.keep_cache", "conflict", "--vllm.keep_cache", "--train.partial_rollout_enable"),
    (PPO, "--vllm.speculative ngram", "invalid-value", "--vllm.speculative ngram", "ngram:3"),
    (
        PPO,
        "--vllm.speculative ngram:3 --algo.router_replay --vllm.enable_prefix_caching",
        "unsupported",
        "--vllm.speculative ngram:3",
        "--algo.router_replay",
    ),
    (
        PPO,
        "--vllm.speculative ngram:3 --rollout.engine transformers",
        "unsupported",
        "--vllm.speculative ngram:3",
        "rollout.engine transformers",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --train.async_enable --train.partial_rollout_enable --vllm.keep_cache",
        "unsupported",
        "--vllm.keep_cache",
        "",
    ),
    # tasks
    (PPO, "--tasks.a.quota 2 --tasks.b.quota 1", "conflict", "--tasks.a.quota 2", "--rollout.batch_size 3"),
    (
        PPO,
        "--tasks.a.quota 1024 --data.prompt_dataset org/a,org/b --data.prompt_probs 0.5,0.5",
        "conflict",
        "--data.prompt_probs 0.5,0.5",
        "the quotas of tasks are exact",
    ),
    (
        PPO,
        FILTER + "--data.curriculum difficulty --train.async_enable --rollout.n_samples_per_prompt 2",
        "unsupported",
        "--data.curriculum difficulty",
        "--algo.dynamic_filtering_enable",
    ),
    (PPO, "--tasks.a.estimator rloo", "conflict", "--tasks.a.estimator rloo", "group_norm, dr_grpo, rloo"),
    (
        PPO,
        "--tasks.a.kl_coef 1 --algo.kl.init_coef 0",
        "conflict",
        "--tasks.a.kl_coef 1.0",
        "--algo.kl.init_coef",
    ),
    (
        PPO,
        "--tasks.a.kl_coef 1 --algo.kl.use_loss --algo.kl.estimator k2",
        "conflict",
        "--tasks.a.kl_coef 1.0",
        "--algo.kl.use_loss",
    ),
    (PPO, "--tasks.a.kl_coef 1 --algo.kl.target 0.1", "conflict", "--tasks.a.kl_coef 1.0", "algo.kl.target"),
    (
        PPO,
        "--tasks.a.reward reward.py --train.agent_func_path reward.py",
        "conflict",
        "--tasks.a.reward reward.py",
        "the agent reward.py gives the rewards",
    ),
    (
        PPO,
        "--reward.remote_url None --reward.model_name_or_path org/rm --tasks.a.reward reward.py",
        "conflict",
        "--tasks.a.reward reward.py",
        "--reward.model_weights",
    ),
    (PPO, "--tasks.a.reward ./r.py", "not-found", "--tasks.a.reward ./r.py", ""),
    (PPO, "--tasks.a.agent ./a.py", "not-found", "--tasks.a.agent ./a.py", ""),
    (PPO, "--tasks.a.qouta 2", "unknown-flag", "--tasks.a.qouta", "tasks.NAME has quota, reward"),
    # algorithm
    (
        PPO,
        "--algo.dynamic_filtering_enable",
        "conflict",
        "--algo.dynamic_filtering_enable",
        "--rollout.n_samples_per_prompt",
    ),
    (
        PPO,
        FILTER + "--reward.remote_url None --teacher.model_name_or_path org/teacher",
        "missing-flag",
        "--algo.dynamic_filtering_enable",
        "--reward.model_name_or_path",
    ),
    (PPO, "--reward.clip_range 5 -5", "invalid-value", "--reward.clip_range 5.0 -5.0", ""),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 5 5",
        "invalid-value",
        "--algo.advantage.is_correction_threshold 5.0 5.0",
        "",
    ),
    (
        PPO,
        f"{LEVEL} token {IS}threshold 1 2 3",
        "invalid-value",
        f"{IS}threshold 1.0 2.0 3.0",
        "",
    ),
    (PPO, f"{LEVEL} token {IS}enable", "conflict", f"{IS}enable", "is_correction_level"),
    (PPO, f"{LEVEL} seq {IS}mode clip", "conflict", f"{IS}mode clip", "a sequence"),
    (
        PPO,
        f"{LEVEL} token {IS}gating tv {IS}threshold 0.1 {IS}mode clip",
        "conflict",
        f"{IS}mode clip",
        "the divergence tv",
    ),
    (
        PPO,
        f"{LEVEL} token {IS}gating binary_kl",
        "conflict",
        f"{IS}threshold 0.5 5.0 (default)",
        "0.05",
    ),
    (
        PPO,
        f"--algo.advantage.proximal_policy rollout {LEVEL} token",
        "conflict",
        f"{LEVEL} token",
        "--algo.advantage.proximal_policy",
    ),
    *(
        (PPO, f"{ONE_STEP} {CENTERED} {line}", "unsupported", CENTERED, remedy)
        for line, remedy in (
            ("--actor.policy_loss_type gspo", "use ppo or cispo"),
            (f"--actor.policy_loss_type {SAPO}", "use ppo or cispo"),
            ("--algo.advantage.proximal_policy rollout", "use recomputed"),
            (f"{LEVEL} seq", "is_correction_level token"),
            (f"{LEVEL} token {IS}gating tv {IS}threshold 0.1", "is_correction_gating ratio"),
            (f"{IS}enable {IS}type seq-mask-tis", "use tis or icepop"),
            ("--rollout.top_p 0.9 --rollout.max_kept_tokens 31", "raise rollout.max_kept_tokens"),
        )
    ),
    (PPO, CENTERED, "unsupported", CENTERED, "--train.force_on_policy"),
    (PPO, "--algo.kl.ref rollout", "conflict", "--algo.kl.ref rollout", "--algo.kl.use_loss"),
    (PPO, f"{SAMPLER} --algo.kl.target 0.1", "conflict", "--algo.kl.target 0.1", "--algo.kl.ref model"),
    (PPO, "--rollout.top_k 1", "conflict", "--rollout.top_k 1", "use 2"),
    (PPO, ["--rollout.stop", "User", ""], "invalid-value", "--rollout.stop User ''", ""),
    (PPO, "--reward.overlong_buffer_len 4096", "conflict", "--reward.overlong_buffer_len 4096.0", ""),
    (
        PPO,
        GSPO + "--actor.loss_aggregation token_mean",
        "conflict",
        "--actor.loss_aggregation token_mean",
        "",
    ),
    (
        PPO,
        GSPO + "--actor.loss_aggregation constant_length",
        "conflict",
        "--actor.loss_aggregation constant_length",
        "",
    ),
    (
        PPO,
        "--actor.policy_loss_type cispo --actor.dual_clip 3",
        "conflict",
        "--actor.dual_clip 3.0",
        "--actor.eps_clip_low_high",
    ),
    (
        PPO,
        "--algo.skip_old_log_probs --algo.kl.init_coef 0 --train.max_epochs 2",
        "conflict",
        "--algo.skip_old_log_probs",
        "",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval.temperature 0",
        "conflict",
        "--eval.temperature 0.0",
        "--eval.n_samples_per_prompt",
    ),
    (PPO, SKIP, "conflict", "--algo.skip_old_log_probs", "--algo.kl.use_loss"),
    (
        PPO,
        SKIP + "--algo.kl.init_coef 0 --teacher.model_name_or_path org/teacher",
        "conflict",
        "--algo.skip_old_log_probs",
        "teacher.model_name_or_path",
    ),
    (
        PPO,
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1 --rollout.mask_truncated",
        "conflict",
        "--algo.skip_old_log_probs",
        "",
    ),
    (
        PPO,
        "--algo.advantage.proximal_policy rollout --algo.advantage.is_correction_enable",
        "conflict",
        "--algo.advantage.is_correction_enable",
        "--algo.advantage.proximal_policy",
    ),
    (PPO, "--algo.advantage.staleness_decay 0", "invalid-value", "--algo.advantage.staleness_decay 0", ""),
    (PPO, "--actor.lr_scheduler cosin", "invalid-value", "--actor.lr_scheduler cosin", "cosine"),
    (SFT, "--lr_scheduler zzz", "invalid-value", "--lr_scheduler zzz", ""),
    # placement
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "conflict",
        "--vllm.num_engines 2",
        "use 4",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.tensor_parallel_size 3",
        "conflict",
        "--vllm.num_engines",
        "vllm.tensor_parallel_size",
    ),
    (PPO, "--ref_num_nodes 0", "conflict", "--ref.num_nodes 0", "use 1"),
    # ranks that share rows
    (SFT, "--ring_attn_size 2", "conflict", "--ds.ring_attn_size 2", ""),
    (PPO, "--ds.ring_attn_size 4 --ref.num_gpus_per_node 2", "conflict", "--ds.ring_attn_size 4", ""),
    (
        PPO,
        "--ds.ring_attn_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "unsupported",
        "--ds.ring_attn_size 2",
        "data.max_images_per_prompt",
    ),
    (
        PPO,
        "--ds.ring_attn_size 2 --ds.attn_implementation sdpa",
        "conflict",
        "--ds.attn_implementation sdpa",
        "ds.ring_attn_size",
    ),
    # ranks that share matrices
    (SFT, "--ds_tensor_parallel_size 2", "conflict", "--ds.tensor_parallel_size 2", ""),
    (
        PPO,
        "--ds.tensor_parallel_size 4 --ref.num_gpus_per_node 2",
        "conflict",
        "--ds.tensor_parallel_size 4",
        "",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 3",
        "conflict",
        "--ds.tensor_parallel_size 2",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.lora.rank 8",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "ds.lora.rank",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ref.offload",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "ref.offload",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "data.max_images_per_prompt",
    ),
    (
        SFT,
        "--ds.tensor_parallel_size 2 --optim muon --max_norm 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2 --actor.optim muon --actor.max_norm 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "actor.optim",
    ),
    # precision and checkpoints
    (SFT, "--ds.adam_offload --ds.zero_stage 0", "conflict", "--ds.adam_offload", "--ds.zero_stage"),
    (
        SFT,
        "--ds.attn_implementation flash_atention_2",
        "invalid-value",
        "--ds.attn_implementation flash_atention_2",
        "flash_attention_2",
    ),
    (PPO, "--ds.attn_implementation paged", "invalid-value", "--ds.attn_implementation paged", ""),
    (
        PPO,
        "--data.pretrain_dataset org/a,org/b --data.pretrain_probs 1",
        "conflict",
        "--data.pretrain_probs 1",
        "",
    ),
    (SFT, "--logger.wandb.key ***", "invalid-value", "--logger.wandb.key", ""),
    # reward models
    (
        PPO,
        "--reward.model_name_or_path a/b,c/d --reward.model_weights 1",
        "conflict",
        "--reward.model_weights 1.0",
        "",
    ),
    # URLs
    (
        PPO,
        "--reward.remote_url http://a/b,http://:80/c",
        "invalid-value",
        "--reward.remote_url http://a/b,http://:80/c",
        "",
    ),
    (
        PPO,
        "--reward.remote_url http://<redacted>@a/b",
        "invalid-value",
        "--reward.remote_url http://<redacted>@a/b",
        "again",
    ),
    (
        SFT,
        "--data.dataset https://a/b.jsonl?token=<redacted>",
        "invalid-value",
        "--data.dataset https://a/b.jsonl?token=<redacted>",
        "again",
    ),
    (SFT, "--optim muon", "conflict", "--max_norm 1.0 (default)", "--max_norm"),
    (
        PPO,
        "--ds.zero_stage 3 --ds.zpg 3 --actor.num_gpus_per_node 4",
        "conflict",
        "--ds.zpg 3",
        "1, 2, 4",
    ),
    (PPO, "--actor.optim muon", "conflict", "--actor.max_norm 1.0 (default)", "--actor.max_norm"),
    (
        PPO,
        "--algo.advantage.estimator gae --critic.optim muon",
        "conflict",
        "--critic.max_norm 1.0 (default)",
        "--critic.max_norm",
    ),
    (PPO, "--actor.optim muon --actor.max_norm 0 --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (SFT, "--optim muon --max_norm 0 --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (DPO, "--model.dropout_enable", "unsupported", "--model.dropout_enable", ""),
    (KTO, "--model.dropout_enable", "unsupported", "--model.dropout_enable", ""),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 0",
        "conflict",
        "--ds.enable_sleep",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 1 "
        "--ds.grad_accum_dtype fp32",
        "unsupported",
        "--ds.enable_sleep",
        "--ds.zero_stage",
    ),
    (SFT, "--ds.grad_accum_dtype fp32 --ds.zero_stage 0", "unsupported", "--ds.grad_accum_dtype fp32", ""),
    (SFT, "--ds.grad_accum_dtype fp16", "unsupported", "--ds.grad_accum_dtype fp16", ""),
    (
        PPO,
        "--reward.model_name_or_path a/b --reward.model_weights 0",
        "conflict",
        "--reward.model_weights 0.0",
        "",
    ),
    (PPO, "--train.agent_func_path agent.txt", "invalid-value", "--train.agent_func_path agent.txt", ""),
    (PPO, "--train.agent_func_path agent.py", "not-found", "--train.agent_func_path agent.py", ""),
    (PPO, "--train.agent_func_path agent.py:Mine", "not-found", "--train.agent_func_path agent.py:Mine", ""),
    (
        PPO,
        "--reward.remote_url rewar.py:judge",
        "not-found",
        "--reward.remote_url rewar.py:judge",
        "reward.py",
    ),
    (
        PPO,
        "--reward.remote_url reward.py:a,reward.py:b",
        "invalid-value",
        "--reward.remote_url reward.py:a,reward.py:b",
        "",
    ),
]


@pytest.mark.parametrize(
    ("command", "line", "code", "place", "told"), CHECKS, ids=[str(line) for _, line, *_ in CHECKS]
)
def test_a_mistake_is_refused_once_with_its_flag_and_remedy(command, line, code, place, told, say):
    config, lines = say(command, line)
    assert config is None
    assert problems_of(lines) == [(code, place)]
    assert told in "\n".join(lines)
    assert len(lines) <= 4


def test_flash_attention_of_a_package_gives_way_where_ranks_share_rows() -> None:
    def of(**flags) -> tuple[str, list[bool]]:
        ds = DeepSpeedConfig(**flags)
        return ds.attention, [p.fatal for p in sequence_parallel(ds, {"run": 2}, reads_images=False)]

    assert of(attn_implementation="flash_attention_2") == ("flash_attention_2", [])
    assert of(attn_implementation="flash_attention_2", ring_attn_size=2) == ("auto", [False])
    assert of(attn_implementation="eager", ring_attn_size=2) == ("eager", [True])


REMARKS = [
    (
        PPO,
        "--train.force_on_policy --train.batch_size 64",
        "--train.batch_size 64",
        "with --train.force_on_policy",
    ),
    (PPO, "--eval.eval_at_start", "--eval.eval_at_start", "without --eval.dataset"),
    (PPO, f"{CRITIC} --critic.muon.lr 1", "--critic.muon.lr 1.0", "--critic.optim"),
    (
        PPO,
        f"{CRITIC} --critic.min_lr_ratio 0.5 --critic.lr_scheduler cosine",
        "--critic.min_lr_ratio 0.5",
        "critic.lr_scheduler",
    ),
    (PPO, f"{CRITIC} --critic.lr_decay_ratio 0.5", "--critic.lr_decay_ratio 0.5", "--critic.lr_scheduler"),
    (
        PPO,
        "--ds.ring_attn_size 2 --ds.sequence_parallel_mode ulysses --ds.ring_attn_head_stride 2",
        "--ds.ring_attn_head_stride 2",
        "ulysses",
    ),
    (SFT, "--train.backend torch --ds.bucket_mb 100", "--ds.bucket_mb 100", ""),
    (
        PPO,
        "--vllm.sync_with_ray --vllm.sync_backend gloo",
        "--vllm.sync_backend gloo",
        "--vllm.sync_with_ray",
    ),
    (SFT, "--packing_samples", "--ds.packing_samples", ""),
    (PPO, "--packing_samples", "--ds.packing_samples", ""),
    (SERVE_RM, "--packing_samples", "--ds.packing_samples", ""),
    (DPO, "--data.dataloader_num_workers 4", "--data.dataloader_num_workers 4", ""),
    (PPO, "--data.dataloader_num_workers 4", "--data.dataloader_num_workers 4", ""),
    (RM, "--compute_fp32_loss", "--model.compute_fp32_loss_enable", ""),
    (
        PPO,
        ONE_GPU + "--train.colocate_all --ref_num_gpus_per_node 8",
        "--ref.num_gpus_per_node 8",
        "actor.num_gpus_per_node",
    ),
    (
        PPO,
        "--reward.model_name_or_path a/b --train.colocate_critic_reward --algo.advantage.estimator gae "
        "--reward.remote_url none --critic.num_gpus_per_node 4 --reward.num_gpus_per_node 2",
        "--reward.num_gpus_per_node 2",
        "critic.num_gpus_per_node",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval_temperature 0",
        "--eval.temperature 0.0",
        "--eval.n_samples_per_prompt",
    ),
    (SFT, "--ckpt.save_steps 5 --ckpt.disable_ds", "--ckpt.disable_ds", "--ckpt.save_hf"),
    (SFT, "--ckpt.save_steps 5 --ckpt.save_hf --ckpt.disable_ds --ckpt.async_save", "--ckpt.async_save", ""),
    (PPO, "--reward.remote_url reward.py --reward.normalize_enable", "--reward.normalize_enable", ""),
    (PPO, "--critic.adam.lr 1", "--critic.adam.lr 1.0", ""),
    (
        PPO,
        "--eval.dataset a/b --eval.steps 1 --ckpt.best_metric_key eval/default_response_length_mean",
        "--ckpt.best_metric_key eval/default_response_length_mean",
        "",
    ),
    (PPO, "--algo.kl.init_coef 0 --algo.kl.use_loss", "--algo.kl.use_loss", "algo.kl.init_coef"),
    (PPO, GROUP + "group_norm --algo.advantage.gamma 0.9", "--algo.advantage.gamma 0.9", ""),
    (PPO, "--reward.model_name_or_path a/b", "--reward.model_name_or_path a/b", "--reward.model_weights"),
    (
        PPO,
        FILTER + "--reward.remote_url none --reward.model_name_or_path a/b",
        "--algo.dynamic_filtering_range 0.0 1.0 (default)",
        "",
    ),
    (PPO, "--algo.kl.use_loss", "--algo.kl.estimator k1 (default)", ""),
    (PPO, "--algo.kl.estimator k3", "--algo.kl.estimator k3", ""),
    (PPO, "--eval.dataset org/e", "--eval.dataset org/e", "--eval.steps"),
    (SFT, ["--data.input_template", "{}\\n"], "--data.input_template {}\\n", ""),
    (PPO, ["--rollout.stop", "\\n\\n"], "--rollout.stop \\n\\n", ""),
    (
        PPO,
        "--train.dynamic_batch_enable --train.micro_batch_size 4",
        "--train.micro_batch_size 4",
        "--train.dynamic_batch_enable",
    ),
    (PPO, "--eval.temperature 1", "--eval.temperature 1.0", "--eval.dataset"),
    (SFT, "--ckpt.save_hf", "--ckpt.save_hf", "--ckpt.save_steps"),
    (SFT, "--ds.use_universal_ckpt", "--ds.use_universal_ckpt", "--ckpt.load_enable"),
    (SFT, "--logger.wandb.org me", "--logger.wandb.org me", "--logger.wandb.key"),
    (PPO, "--critic.num_nodes 2", "--critic.num_nodes 2", ""),
    (PPO, "--algo.kl.init_coef 0 --ref.offload", "--ref.offload", "algo.kl.init_coef"),
    (PPO, "--reward.offload", "--reward.offload", ""),
    (PPO, "--reward.remote_url http://a/b --reward.timeout 9", "--reward.timeout 9.0", ""),
    (PPO, "--train.agent_func_path reward.py", "--reward.remote_url reward.py", "--train.agent_func_path"),
    (PPO, "--reward.remote_timeout 9", "--reward.remote_timeout 9.0", ""),
    (PPO, "--reward.remote_url https://a:5000", "--reward.remote_url https://a:5000", ""),
    (PPO, "--ds.value_head_prefix x", "--ds.value_head_prefix x", ""),
    (PPO, "--vllm.enable_sleep", "--vllm.enable_sleep", ""),
    (PPO, "--vllm.lora_sync adapter", "--vllm.lora_sync adapter", "--ds.lora.rank"),
    (
        PPO,
        "--vllm.kv_cache_gb 1 --vllm.gpu_memory_utilization 0.5",
        "--vllm.gpu_memory_utilization 0.5",
        "--vllm.kv_cache_gb",
    ),
    (PPO, "--actor.policy_loss_type gspo", "--actor.policy_loss_type gspo", "--actor.eps_clip_low_high"),
    (PPO, SKIP + "--algo.kl.init_coef 0 --actor.eps_clip 0.3", "--actor.eps_clip 0.3", ""),
    (PPO, "--ckpt.best_metric_key x_pass1", "--ckpt.best_metric_key x_pass1", "--eval.dataset"),
    (
        PPO,
        "--rollout.vllm_generate_batch_size 2048",
        "--rollout.vllm_generate_batch_size 2048",
        "--algo.advantage.is_correction_level token",
    ),
    (PPO, "--algo.advantage.estimator rloo", "--rollout.n_samples_per_prompt 1 (default)", ""),
    # nothing reads it
    (PPO, "--ptx_coef 0.1", "--actor.ptx_coef 0.1", "--data.pretrain_dataset"),
    (PPO, "--max_steps 3", "--train.max_turns 3", "--train.agent_func_path"),
    (PPO, "--rollout.max_kept_tokens 8", "--rollout.max_kept_tokens 8", "--rollout.top_p"),
    (
        PPO,
        "--data.pretrain_dataset org/texts --actor.ptx_coef 0",
        "--data.pretrain_dataset org/texts",
        "--actor.ptx_coef",
    ),
    (SFT, "--ds.lora.alpha 32", "--ds.lora.alpha 32", "--ds.lora.rank"),
    (SFT, "--ds.ring_attn_head_stride 2", "--ds.ring_attn_head_stride 2", "ds.ring_attn_size"),
    (SFT, "--ds.sequence_parallel_mode ulysses", "--ds.sequence_parallel_mode ulysses", "ds.ring_attn_size"),
    (SFT, "--ds.zpg 8", "--ds.zpg 8", ""),
    (SFT, "--ds.bucket_mb 8 --ds.zero_stage 0", "--ds.bucket_mb 8", ""),
    (SFT, "--ds.activation_offload", "--ds.activation_offload", "--model.gradient_checkpointing_enable"),
    (PPO, "--ds.activation_offload", "--ds.activation_offload", "--actor.gradient_checkpointing_enable"),
    (SFT, "--train.max_tokens_per_gpu 8", "--train.max_tokens_per_gpu 8", "--train.dynamic_batch_enable"),
    (PPO, "--rollout.max_tokens_per_gpu 8", "--rollout.max_tokens_per_gpu 8", "--train.dynamic_batch_enable"),
    (
        SFT,
        "--data.tokenizer_chat_template {{x}}",
        "--data.tokenizer_chat_template {{x}}",
        "--data.apply_chat_template",
    ),
    (
        PPO,
        "--data.input_template {} --data.apply_chat_template",
        "--data.input_template {}",
        "--data.apply_chat_template",
    ),
    (SFT, "--muon.lr 1", "--muon.lr 1.0", "--optim"),
    (SFT, "--optim muon --max_norm 0 --muon.ns_steps 4", "--muon.ns_steps 4", ""),
    (SFT, "--data.no_cache_enable --data.cache_dir x", "--data.cache_dir x", "--data.cache_enable"),
    (RM, "--model.loss_type logexp --model.margin_loss_enable", "--model.margin_loss_enable", ""),
    (
        DPO,
        "--model.ipo_enable --model.label_smoothing 0.1",
        "--model.label_smoothing 0.1",
        "--model.ipo_enable",
    ),
    (KD, "--model.kd_coef 0 --model.kd_temperature 2", "--model.kd_temperature 2.0", ""),
    (SFT, "--model.pretrain_mode_enable", "--data.output_key out", "--model.pretrain_mode_enable"),
    (PPO, "--teacher.kd_coef 2", "--teacher.kd_coef 2.0", "--teacher.model_name_or_path"),
    (SFT, "--min_lr_ratio 0.5 --lr_scheduler cosine", "--min_lr_ratio 0.5", ""),
    (SFT, "--lr_decay_ratio 0.5", "--lr_decay_ratio 0.5", "--lr_scheduler"),
    (PPO, "--actor.lr_decay_ratio 0.5", "--actor.lr_decay_ratio 0.5", "--actor.lr_scheduler"),
    (
        SFT,
        "--model.gradient_checkpointing_reentrant",
        "--model.gradient_checkpointing_reentrant",
        "--model.gradient_checkpointing_enable",
    ),
    (SFT, "--ds.enable_sleep", "--ds.enable_sleep", ""),
    (PPO, "--algo.advantage.lambd 0.9", "--algo.advantage.lambd 0.9", ""),
    (PPO, GROUP + "rloo --algo.advantage.no_std_norm", "--algo.advantage.no_std_norm", ""),
    (PPO, f"{IS}mode clip", f"{IS}mode clip", LEVEL),
    (PPO, f"{IS}threshold 0.5 2", f"{IS}threshold 0.5 2.0", LEVEL),
    (PPO, "--algo.kl.unbiased_gradient", "--algo.kl.unbiased_gradient", "--algo.kl.use_loss"),
    (PPO, f"{SAMPLER} --ref.offload", "--ref.offload", "--algo.kl.ref rollout"),
    (
        PPO,
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_enable",
    ),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_sequence_threshold 0.99 1.01",
        "--algo.advantage.is_correction_sequence_threshold 0.99 1.01",
        "--algo.advantage.is_correction_type",
    ),
    (
        PPO,
        "--algo.advantage.staleness_decay 0.9",
        "--algo.advantage.staleness_decay 0.9",
        "--train.async_enable",
    ),
    (
        PPO,
        "--train.async_enable --train.async_queue_size 0 --algo.advantage.max_token_staleness 2",
        "--algo.advantage.max_token_staleness 2",
        "--train.async_enable",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.max_token_staleness 1",
        "--algo.advantage.max_token_staleness 1",
        "",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.proximal_policy interpolated",
        "--algo.advantage.proximal_policy interpolated",
        "--train.async_queue_size",
    ),
    (PPO, "--algo.kl.horizon 5", "--algo.kl.horizon 5", "--algo.kl.target"),
    (PPO, "--algo.kl.target 0.1 --algo.kl.horizon 1023", "--algo.kl.horizon 1023", "use 1024"),
    (
        PPO,
        "--algo.dynamic_filtering_range 0 0.9",
        "--algo.dynamic_filtering_range 0.0 0.9",
        "--algo.dynamic_filtering_enable",
    ),
    (
        PPO,
        "--algo.dynamic_filtering_max_batches 3",
        "--algo.dynamic_filtering_max_batches 3",
        "--algo.dynamic_filtering_enable",
    ),
    (
        PPO,
        "--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.3",
        "--actor.eps_clip 0.1",
        "--actor.eps_clip_low_high",
    ),
    (PPO, "--actor.muon.lr 1", "--actor.muon.lr 1.0", "--actor.optim"),
    (PPO, "--actor.optim muon --actor.max_norm 0 --actor.muon.ns_steps 4", "--actor.muon.ns_steps 4", ""),
    (PPO, "--actor.min_lr_ratio 0.5 --actor.lr_scheduler linear", "--actor.min_lr_ratio 0.5", ""),
    (
        PPO,
        "--actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_enable",
    ),
    (
        PPO,
        "--reward.overlong_penalty_factor 2",
        "--reward.overlong_penalty_factor 2.0",
        "--reward.overlong_buffer_len",
    ),
    (PPO, "--train.async_queue_size 2", "--train.async_queue_size 2", "--train.async_enable"),
    (
        PPO,
        "--train.async_enable --train.async_queue_size 2",
        "--train.async_queue_size 2",
        "--algo.advantage.is_correction_level token",
    ),
    (
        PPO,
        "--train.async_enable --train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "--train.async_enable",
        "train.colocate_all",
    ),
    (PPO, "--train.ema_beta 0.5", "--train.ema_beta 0.5", "--train.enable_ema"),
    (PPO, "--ds.lora.rank 4 --ref.offload", "--ref.offload", ""),
    (PPO, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (PPO, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (RM, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (RM, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (DPO, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (DPO, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (KTO, "--model.freeze_visual_encoder", "--model.freeze_visual_encoder", "data.max_images_per_prompt"),
    (RM, "--data.image_hosts a.org", "--data.image_hosts a.org", "--data.max_images_per_prompt"),
    (PPO, "--actor.freeze_visual_encoder", "--actor.freeze_visual_encoder", "--data.max_images_per_prompt"),
    (PPO, "--critic_learning_rate 1", "--critic.adam.lr 1.0", ""),
    (
        PPO,
        "--use_icepop",
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_enable",
    ),
]


def test_a_text_is_one_prompt_in_every_command():
    """A text that SFT learned to answer is the text that RL and inference ask, also if nobody names a
    template."""
    templates = {c.name: flag_values(c.config_type()).get("data.input_template") for c in COMMANDS}
    assert set(templates.values()) == {None}


@pytest.mark.parametrize("command", [SFT, KTO, KD])
def test_plain_rows_without_a_template_are_told_how_to_mark_responses(command, capsys):
    base = "--model.model_name_or_path org/m --data.dataset org/d --data.output_key out "
    base += "--teacher.model_name_or_path org/t" if command is KD else ""
    template = "--data.input_template"
    for more in (f"{template} None", f"{template} Q:{{}}", "--data.apply_chat_template", ""):
        parse(command, [*base.split(), *more.split()])
        assert (f"note: {template}: " in capsys.readouterr().err) == (more == "")


@pytest.mark.parametrize(
    ("command", "line", "place", "told"), REMARKS, ids=[str(line) for _, line, *_ in REMARKS]
)
def test_remarks_do_not_stop_a_run(command, line, place, told, say):
    config, lines = say(command, line)
    assert config is not None
    (remark,) = [text for text in lines if " is now --" not in text]
    assert remark.startswith(f"note: {place}: ") and told in remark


@pytest.mark.parametrize(
    "line",
    [
        SKIP + "--algo.kl.init_coef 0",
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k3",
        SKIP + "--algo.kl.init_coef 0 --actor.policy_loss_type gspo",
        GSPO + "--actor.loss_aggregation sample_mean",
        GSPO + "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
        "--actor.policy_loss_type cispo --actor.loss_aggregation constant_length",
        f"{LEVEL} seq {IS}gating binary_kl {IS}threshold 0.05",
        f"{LEVEL} token {IS}mode clip {IS}threshold 2",
        SAMPLER,
        "--algo.kl.use_loss --algo.kl.unbiased_gradient",
        GSPO + "--algo.advantage.proximal_policy rollout",
        "--train.async_enable --train.async_queue_size 4 --algo.advantage.is_correction_enable "
        "--algo.advantage.proximal_policy interpolated --algo.advantage.staleness_decay 0.9 "
        "--algo.advantage.max_token_staleness 3",
    ],
)
def test_policy_losses_without_a_word(line, say):
    config, lines = say(PPO, line)
    assert config is not None and not lines


@pytest.mark.parametrize(
    ("command", "flags", "flag"),
    [
        (PPO, "--actor.adam.lr 5e-4", None),  # the demo
        (PPO, "--actor.adam.lr 1e-2", "--actor.adam.lr 0.01"),
        (PPO, "--actor.adam.lr 1e-2 --ds.lora.rank 8", None),
        (PPO, "--actor.adam.lr 1e-1 --ds.lora.rank 8", "--actor.adam.lr 0.1"),
        (PPO, "--algo.advantage.estimator gae --critic.adam.lr 0.1", "--critic.adam.lr 0.1"),
        (SFT, "--adam.lr 4e-3", None),  # the pictures of examples/
        (SFT, "--adam.lr 0.5", "--adam.lr 0.5"),
        (SFT, "--optim muon --max_norm 0", None),
        (SFT, "--optim muon --max_norm 0 --muon.lr 0.5", "--muon.lr 0.5"),
    ],
)
def test_a_learning_rate_that_destroys_models_of_any_size(command, flags, flag, say):
    _, lines = say(command, flags)
    told = [line for line in lines if "too large for tiny models too" in line]
    assert [line.partition(": is ")[0] for line in told] == ([f"note: {flag}"] if flag else [])


@pytest.mark.parametrize(("flags", "told"), [("--rollout.max_new_tokens 64", True), ("", False)])
def test_the_length_penalty_of_an_episode_with_the_limit_of_an_answer_is_told(flags, told, say):
    line = f"--train.agent_func_path agents:Guess --reward.overlong_buffer_len 8 {flags}"
    _, lines = say(PPO, line)
    assert any("max_new_tokens 64 is the limit of one answer" in text for text in lines) == told


def test_what_is_said_twice_over_two_models_is_no_remark(say):
    """`--max_norm` sets actor and critic; without a critic this is nobody's mistake."""
    _, lines = say(PPO, "--max_norm 2 --l2 0.1 --adam_betas 0.8 0.9")
    assert all(" is now --" in line for line in lines) and len(lines) == 3


def test_setting_a_default_is_no_mistake(say):
    line = "--critic.adam.lr 9e-6 --algo.advantage.gamma 1.0 --algo.advantage.lambd 1 --ema_beta 0.992"
    config, _ = say(PPO, line)
    assert config is not None


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(optim="muon", lr_scheduler="linear")])
def test_the_optimizer_of_a_section_has_the_flags_without_effect_of_any_other(optim):
    of_actor = [keys.replace("actor.", "") for keys, _ in optimizer_ignored(optim, "actor.")]
    assert of_actor == [keys for keys, _ in optimizer_ignored(optim)]


CHECKED = {
    checks: ("image_rows", "precision", "common_ignored", "template_ignored"),
    supervised_checks: ("_ignored", "_pretraining_ignored", "_pretraining", "_balance", "_no_dropout"),
    ppo_checks: (
        *(
            "_sources",
            "_tasks",
            "_quotas",
            "_policy",
            "_skipped_log_probs",
            "_sampling",
            "_asynchronous",
            "_correction",
            "_ignored",
            "_ignored_by_algorithm",
        ),
        *("_kl", "_policy_loss"),
    ),
}
"""Functions of the checks, by module, whose texts are all tested."""


def texts_in(module, names):
    """Returns the constant texts in functions that are more than names of flags."""
    for function in ast.parse(inspect.getsource(module)).body:
        if isinstance(function, ast.FunctionDef) and function.name in names:
            nodes = [node for statement in function.body for node in ast.walk(statement)]
            texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
            words = [text.split() for text in texts if isinstance(text, str)]
            words = words[1:] if ast.get_docstring(function) else words
            yield from (" ".join(w) for w in words if len(w) > 3 and not all("." in word for word in w))


@pytest.mark.processes
def test_every_reason_is_tested(say):
    """Each text of these checks is told about a command line above."""
    told = " ".join(line for command, words, *_ in CHECKS + REMARKS for line in say(command, words)[1])
    texts = [text for module, names in CHECKED.items() for text in texts_in(module, names)]
    assert len(texts) > 90
    told = " ".join(told.split())
    assert not [text for text in texts if text not in told]


def test_ranks_come_from_the_launcher(say, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    _, lines = say(SFT, "--train.batch_size 128")
    assert problems_of(lines) == [("conflict", "--train.batch_size 128")] and "120 or 144" in lines[0]


def test_a_small_batch_is_one_row(say):
    assert say(SFT, "--train.batch_size 4")[0].train.batch_size == 4


def test_a_reward_file_may_have_a_comma_in_its_path(say, tmp_path):
    (folder := tmp_path / "a, b").mkdir()
    (folder / "reward.py").touch()
    config, _ = say(PPO, ["--reward.remote_url", f"{folder}/reward.py"])
    assert (config.reward.function, config.reward.servers) == (f"{folder}/reward.py", ())
    servers = say(PPO, ["--reward.remote_url", "http://a/x, http://b/y"])[0].reward.servers
    assert servers == ("http://a/x", "http://b/y")
    _, lines = say(PPO, ["--reward.remote_url", f"{tmp_path}/c, d/reward.py"])
    assert any("commas separate sources" in line for line in lines)


def test_paths_with_commas_and_ats(say, tmp_path):
    (tmp_path / "a,b@c.jsonl").write_text("")
    (tmp_path / "d").mkdir()
    config, lines = say(SFT, "--data.dataset ./a,b@c.jsonl,.@d --data.dataset_probs 0.5,0.5")
    assert config is not None, lines


# ---- what follows from several flags


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("", None),
        ("--model.margin_loss_enable", "margin"),
        ("--model.margin_loss_enable --model.loss_type logexp", None),
    ],
)
def test_the_column_of_margins_belongs_to_those_that_are_read(line, column, say):
    config, _ = say(RM, line)
    assert config.columns["--model.margin_loss_enable"] == column


def test_derived_values(say):
    config, _ = say(
        PPO, "--logger.wandb.run_name r --ckpt.output_dir o --rollout.batch_size 256 --train.max_epochs 3"
    )
    assert config.run_dir == "o/runs/r"
    assert config.samples_per_step == 256 and config.updates_per_step == 6
    assert config.actor.clip_range == (0.2, 0.2)
    assert (
        config.num_engines == 1
        and config.placements["ref"] == (Mesh(data=8), None)
        and config.uses_reference
        and not config.uses_critic
    )
    assert config.longest_response == 2048 and config.rollout_tokens_per_gpu == 16192
    assert config.reward.function == "reward.py"
    line = (
        "--train.colocate_all --vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 4 --actor.num_nodes 2"
    )
    assert say(PPO, line)[0].data_parallel_size == 8
    config, _ = say(PPO, line + " --actor.eps_clip_low_high 0.2 0.27 --vllm.enable_sleep --ref_num_nodes 0")
    assert (
        config.num_engines == 4
        and config.placements["ref"] == (Mesh(data=8), "actor")
        and config.engines_sleep
    )
    assert config.actor.clip_range == (0.2, 0.27)


@pytest.mark.parametrize("place", ["", "--train.colocate_all"])
def test_an_evaluation_alone_has_the_policy_and_what_gives_rewards(say, place):
    """The critic, which hosts the reward models of a run that learns, the reference and the teacher are left
    out, with their GPUs."""
    words = f"--algo.advantage.estimator gae --algo.kl.init_coef 0.1 --reward.model_name_or_path rm {place} "
    words += "--reward.model_weights 1 --train.colocate_critic_reward"
    learning, _ = say(PPO, words)
    alone, _ = say(PPO, f"{words} --eval.eval_only --eval.dataset org/x")
    assert learning.placements.keys() == {"actor", "critic", "ref", "reward"}
    assert alone.placements.keys() == {"actor", "reward"}
    host = "actor" if place else None
    assert alone.placements["reward"].colocated_with == host
    assert learning.placements["reward"].colocated_with == (host or "critic")


ROLLOUT = "--algo.advantage.proximal_policy rollout"
ONE_UPDATE = "--train.batch_size 1024"  # 128 prompts of 8 samples


@pytest.mark.parametrize(
    ("line", "skips"),
    [
        (f"{ONE_UPDATE} --algo.kl.init_coef 0", True),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --algo.skip_old_log_probs false", False),
        ("--train.batch_size 512 --algo.kl.init_coef 0", False),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --train.max_epochs 2", False),
        (ONE_UPDATE, False),  # the KL is in the reward
        (f"{ONE_UPDATE} --algo.kl.use_loss --algo.kl.estimator k2", True),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --teacher.model_name_or_path org/teacher", False),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --rollout.mask_truncated", False),
        # No forward pass for a sampler that knows its log-probs, whatever the number of optimizer steps.
        (f"{ROLLOUT} --algo.kl.init_coef 0 --train.max_epochs 2 --rollout.mask_truncated", True),
        (f"{ROLLOUT} --algo.kl.init_coef 0 --algo.skip_old_log_probs", True),
        (f"{ROLLOUT} --algo.kl.init_coef 0 --algo.skip_old_log_probs false", False),
        ("--algo.advantage.proximal_policy interpolated --algo.kl.init_coef 0", True),
        (ROLLOUT, False),  # the KL is in the reward
        (f"{ROLLOUT} --algo.kl.use_loss --algo.kl.estimator k2", True),
        (f"{ROLLOUT} --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", False),
        (f"{ROLLOUT} {ONE_UPDATE} --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", True),
    ],
)
def test_old_log_probs_are_skipped_where_nothing_reads_them_before_the_update(line, skips, say):
    assert say(PPO, line)[0].skips_old_log_probs is skips


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("", None),
        ("--rollout.top_p 0.9", None),  # training normalises over the recorded supports
        ("--rollout.max_kept_tokens 0", None),  # nothing is truncated
        ("--rollout.top_p 0.9 --rollout.max_kept_tokens 0", math.inf),
        ("--rollout.top_k 20 --rollout.max_kept_tokens 0", math.inf),
        ("--rollout.top_p 0.9 --rollout.max_kept_tokens 0 --algo.max_mismatch 0.2", 0.2),
    ],
)
def test_samples_of_an_unrecorded_truncated_distribution_have_no_default_limit(line, limit, say):
    assert say(PPO, line)[0].largest_mismatch == limit


@pytest.mark.parametrize(
    ("line", "remarked"), [("", True), ("--algo.advantage.proximal_policy rollout", False)]
)
def test_the_clip_is_read_in_a_step_of_one_update_where_it_counts_from_the_sampler(line, remarked, say):
    _, problems = say(PPO, f"{ONE_UPDATE} --algo.kl.init_coef 0 --actor.eps_clip 0.3 {line}")
    assert any(text.startswith("note: --actor.eps_clip 0.3: ") for text in problems) is remarked


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("", 0),
        (FILTER, 0),
        ("--train.async_enable --train.async_queue_size 3", 3),
        ("--rollout.vllm_generate_batch_size 2048", math.inf),
        (f"{FILTER} --rollout.vllm_generate_batch_size 100", math.inf),
        ("--rollout.vllm_generate_batch_size 100", 0),
    ],
)
def test_how_stale_samples_can_be(line, steps, say):
    assert say(PPO, line)[0].largest_staleness == steps


@pytest.mark.parametrize(
    "line", ["--rollout.vllm_generate_batch_size 2048", "--train.async_enable --train.async_queue_size 2"]
)
def test_a_ratio_to_the_sampler_knows_that_samples_are_older(line, say):
    more = ("", "--algo.advantage.proximal_policy rollout", f"{CENTERED} {ONE_STEP}")
    remarks = [say(PPO, f"{line} {flags}")[1] for flags in more]
    assert [any("algo.advantage.is_correction_level" in text for text in texts) for texts in remarks] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"{LEVEL} token",
        f"{LEVEL} token {IS}mode clip {IS}threshold 2",
        f"{IS}enable {IS}type icepop",
        "--actor.policy_loss_type cispo",
        "--rollout.top_p 0.9",
        "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.ref rollout",
        "--rollout.temperature 0.7",
    ],
)
def test_what_scores_can_be_centered_with(line, say):
    config, problems = say(PPO, f"{ONE_STEP} {CENTERED} {line}")
    assert config is not None, problems
    assert config.algo.advantage.score_centering_top_k == 32
    assert not any("score_centering" in text for text in problems)


@pytest.mark.parametrize("command", ["sft", "rm", "prm", "dpo", "kto", "kd", "ppo"])
def test_run_names_tell_the_command_and_the_start_time_and_are_unique(command):
    config_type = next(c for c in COMMANDS if c.name == command).config_type
    names = {config_type().logger.wandb.run_name for _ in range(20)}
    assert len(names) == 20
    for name in names:
        prefix, start, _ = name.split("_")
        assert prefix == command and time.strptime(start, "%m%dT%H:%M")


@pytest.mark.parametrize("config_type", [PPOConfig, DPOConfig])
def test_checkpoints_lie_in_the_output_folder_unless_they_are_named(config_type):
    ckpt = config_type().ckpt
    assert dataclasses.replace(ckpt, output_dir="out").folder == "out/checkpoints"
    assert dataclasses.replace(ckpt, output_dir="out", path="elsewhere").folder == "elsewhere"


def test_an_interval_is_due_at_its_multiples():
    assert [step for step in range(1, 8) if is_due(step, 3)] == [3, 6]
    assert not any(is_due(step, every) for step in range(1, 8) for every in (-1, 0))


def test_a_value_becomes_words_of_the_command_line():
    assert to_words((0.5, None, True)) == ("0.5", "None", "true")
