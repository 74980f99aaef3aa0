"""The command of reinforcement learning, declared for `parse`."""

from collections.abc import Mapping

from openrlhf.config import old_flags
from openrlhf.config.command import Command
from openrlhf.config.old_flags import OldFlag, Said, Words, converted, removed, renamed, switch, value
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_placement_problems, ppo_problems

_OLD_RESPONSE_LENGTH: Words = ("1024",)
"""Default of `--generate_max_len` in older versions."""


def _prompt_length(words: Words, said: Said) -> Mapping[str, Words]:
    """Adds the separate budgets of prompt and response to `data.max_len`, the budget of both together."""
    if "data.max_len" in said or "max_len" in said:
        return {}
    for name in ("generate_max_len", "max_new_tokens", "rollout.max_new_tokens"):
        if name in said:
            return {"data.max_len": _sum(words, said[name])}
    return {"data.max_len": _sum(words, _OLD_RESPONSE_LENGTH), "rollout.max_new_tokens": _OLD_RESPONSE_LENGTH}


def _sum(words: Words, more: Words) -> Words:
    if all(len(side) == 1 and side[0].isdecimal() for side in (words, more)):
        return (str(int(words[0]) + int(more[0])),)
    return words  # not a number: the type check says so


def _symmetric(words: Words, said: Said) -> Words:
    """Uses a single bound for both sides."""
    return ("-" + words[0].lstrip("-"), words[0].lstrip("-")) if _is_one(words) else words


def _is_one(words: Words) -> bool:
    return len(words) == 1 and "," not in words[0]


def _clip(said: Said, side: str) -> Words:
    return said.get(f"clip_eps_{side}", said.get("eps_clip", ("0.2",)))


def _gspo(words: Words, said: Said) -> Mapping[str, Words]:
    """Translates the loss of Molt's gspo, which averages over tokens."""
    own = {"actor.loss_aggregation", "actor.loss_agg_mode"} & set(said)
    return {"actor.policy_loss_type": words} | ({} if own else {"actor.loss_aggregation": ("token_mean",)})


_ESTIMATOR, _LEVEL = "algo.advantage.estimator", "algo.advantage.is_correction_level"
_ENGINE_ARGUMENTS = """
    async_scheduling attention_backend block_size decode_context_parallel_size disable_custom_all_reduce
    enable_chunked_prefill enable_expert_parallel gdn_prefill_backend mamba_ssm_cache_dtype
    max_num_batched_tokens mm_encoder_attn_backend moe_backend
"""
"""Arguments of vLLM's engines that are flags in Molt."""
MOLT: dict[str, OldFlag] = {
    **old_flags.MOLT,
    **old_flags.molt_model("actor"),
    **renamed("""
        : algo.advantage.lam=algo.advantage.lambd train.agent_path=train.agent_func_path
        : train.colocate_fsdp_models=train.colocate_actor_ref actor.loss_mode=actor.policy_loss_type
    """),
    "train.force_sync_mode": switch("train.async_enable", "false"),
    "train.routing_replay": converted("algo.router_replay", "vllm.enable_prefix_caching"),
    "vllm.mtp_num_speculative_tokens": converted(
        "vllm.speculative", words_of=lambda words, said: tuple(f"mtp:{word}" for word in words)
    ),
    "vllm.mtp_num_speculative_tokens 0": value("vllm.speculative", "None"),
    f"{_ESTIMATOR} grpo": value(_ESTIMATOR, "group_norm"),
    f"{_LEVEL} geo": value(_LEVEL, "seq"),
    "actor.loss_mode gspo": OldFlag(to=("actor.policy_loss_type", "actor.loss_aggregation"), translate=_gspo),
    **renamed(": " + " ".join(f"vllm.{name}=vllm.engine_args.{name}" for name in _ENGINE_ARGUMENTS.split())),
    **removed(f"""
        {_ESTIMATOR} on_policy_distill: use --teacher.model_name_or_path, which rewards each action
        algo.advantage.is_correction_mode trunc: use clip and one upper bound, is_correction_threshold HIGH
        algo.advantage.no_whiten: use --algo.advantage.no_std_norm (subtracts the mean), or flash_reinforce
        actor.loss_mode cispo: use --actor.policy_loss_type cispo; its eps_clip_low_high are distances from 1
        actor.freezing_steps: use --critic.freezing_steps, which counts RL steps
        actor.muon.weight_decay, critic.muon.weight_decay: Muon has that of --actor.adam.weight_decay
        critic.max_epochs: the critic makes the passes of --train.max_epochs; remove it
        ref.model_name_or_path: the reference is the policy at its start; see --teacher.model_name_or_path
        ckpt.warm_resume_rollouts: a resumed run samples again what it had not trained on; remove it
        train.rollout_dump_dir, train.rollout_replay_dir: the run folder has all samples; see openrlhf replay
        vllm.data_parallel_size: each engine is a data-parallel copy; use --vllm.num_engines
        vllm.dtype: engines compute in --ds.param_dtype; remove it
        vllm.distributed_executor_backend: the place of an engine decides; remove it
    """),
    "train.check_weight_update_equal": OldFlag(bare=True, ignored="see --vllm.sync_check_steps"),
    "rollout.num_runners": OldFlag(ignored="agents run in the engines' processes"),
    "eval.batch_size": OldFlag(ignored="engines get all prompts of an evaluation"),
    **dict.fromkeys(
        ("vllm.router_policy", "vllm.router_balance_abs", "vllm.router_balance_rel"),
        OldFlag(ignored="a request goes to the engine with the fewest"),
    ),
}
"""Flags and values of Molt."""
_CORRECTION_TYPE = "algo.advantage.is_correction_type"
_THRESHOLD = "algo.advantage.is_correction_threshold"
_AGGREGATION, _CLIP = "actor.loss_aggregation", "actor.eps_clip_low_high"
OLD_FLAGS: dict[str, OldFlag] = {
    **old_flags.TRAINING,
    **old_flags.TEMPLATES,
    **old_flags.HEAD,
    **renamed("""
        actor_: num_nodes num_gpus_per_node
        critic_: num_nodes num_gpus_per_node
        ref_: num_nodes num_gpus_per_node
        reward_: num_nodes num_gpus_per_node
        train: colocate_actor_ref colocate_critic_reward async_queue_size colocate_all_models=colocate_all
        train: async_train=async_enable partial_rollout=partial_rollout_enable num_episodes
        train: enable_ema ema_beta agent_func_path max_steps=max_turns
        vllm: enable_prefix_caching enforce_eager
        vllm_: num_engines tensor_parallel_size enable_sleep sync_backend sync_with_ray
        vllm_: gpu_memory_utilization
        ds: deepspeed_enable_sleep=enable_sleep
        rollout: rollout_batch_size=batch_size vllm_generate_batch_size n_samples_per_prompt temperature top_p
        rollout: micro_rollout_batch_size=micro_batch_size rollout_micro_batch_size=micro_batch_size
        rollout: n_samples_per_prompts=n_samples_per_prompt generate_max_len=max_new_tokens max_new_tokens
        rollout: rollout_max_tokens_per_gpu=max_tokens_per_gpu
        data: input_key prompt_split label_key pretrain_split prompt_data=prompt_dataset
        data: image_key max_images_per_prompt
        data: prompt_data_probs=prompt_probs pretrain_data=pretrain_dataset
        data: pretrain_data_probs=pretrain_probs
        eval_: temperature n_samples_per_prompt
        algo.advantage: advantage_estimator=estimator gamma lambd no_advantage_std_norm=no_std_norm
        algo.advantage: enable_vllm_is_correction=is_correction_enable
        algo.kl: init_kl_coef=init_coef use_kl_loss=use_loss
        algo.kl_: target horizon estimator
        algo: dynamic_filtering=dynamic_filtering_enable
        algo: dynamic_filtering_reward_range=dynamic_filtering_range
        actor: pretrain=model_name_or_path eps_clip eps_clip_low_high dual_clip policy_loss_type
        actor: freeze_visual_encoder
        actor: aux_loss_coef ptx_coef entropy_loss_coef=entropy_coef actor_learning_rate=adam.lr
        actor: gradient_checkpointing=gradient_checkpointing_enable
        actor: gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant
        actor,critic: adam_betas=adam.betas l2=adam.weight_decay
        actor,critic: lr_scheduler lr_warmup_ratio min_lr_ratio max_norm
        critic: critic_learning_rate=adam.lr critic_pretrain=model_name_or_path
        critic: freezing_actor_steps=freezing_steps value_clip save_value_network
        reward: reward_pretrain=model_name_or_path remote_rm_url=remote_url normalize_reward=normalize_enable
        reward: overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef
        ref,reward: ref_reward_offload=offload
        ckpt: best_metric_key
    """),
    "prompt_max_len": OldFlag(to=("data.max_len", "rollout.max_new_tokens"), translate=_prompt_length),
    "advantage_estimator grpo": value(_ESTIMATOR, "group_norm"),
    "vllm_is_correction_type": converted(_CORRECTION_TYPE),
    "vllm_is_correction_type mis": value(_CORRECTION_TYPE, "seq-mask-tis"),
    "use_icepop": switch(_CORRECTION_TYPE, "icepop"),
    "vllm_is_truncated_threshold": converted(
        _THRESHOLD, words_of=lambda words, said: ("0", *words) if _is_one(words) else words
    ),
    "actor.loss_agg_mode": converted(_AGGREGATION),
    "actor.loss_agg_mode token-mean": value(_AGGREGATION, "token_mean"),
    "actor.loss_agg_mode seq-mean-token-mean": value(_AGGREGATION, "sample_mean"),
    "actor.loss_agg_mode prompt-mean-token-mean": value(_AGGREGATION, "prompt_mean"),
    "use_kl_estimator_k3": switch("algo.kl.estimator", "k3"),
    "clip_eps_low": converted(_CLIP, words_of=lambda low, said: low + _clip(said, "high")),
    "clip_eps_high": converted(_CLIP, words_of=lambda high, said: _clip(said, "low") + high),
    "reward_clip_range": converted("reward.clip_range", words_of=_symmetric),
    **MOLT,
    "actor_init_on_gpu": OldFlag(bare=True, ignored="models are always loaded where they train"),
}

PPO = Command(
    name="ppo",
    config_type=PPOConfig,
    summary="Reinforcement learning (PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO) with Ray, vLLM and DeepSpeed.",
    old_flags=OLD_FLAGS,
    problems=ppo_problems,
    placed=ppo_placement_problems,
    selected=lambda config: config.selected,
    variables={
        "rollout.max_concurrent_episodes": "OPENRLHF_ASYNC_NUM_TASKS",
        "train.async_queue_size": "OPENRLHF_ASYNC_QUEUE_SIZE",
    },
    has_plan=True,
)
