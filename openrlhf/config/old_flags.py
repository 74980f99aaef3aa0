"""Flags of older versions, of TRL and of verl with their current meaning, which no other module knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Words = tuple[str, ...]
"""Words that follow a flag."""
Said = Mapping[str, Words]
"""Words of all flags on the command line and in files, under the names that were used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OldFlag:
    to: tuple[str, ...] = ()
    """Current flags that it sets."""
    translate: Callable[[Words, Said], Mapping[str, Words]] = lambda words, said: {}
    """Maps its words and all flags given to the words of each current flag."""
    bare: bool = False
    """A switch: it takes no value, or true or false."""
    ignored: str = ""
    """Accepted without effect, for this reason."""
    removed: str = ""
    """Refused, with this remedy."""


def _renamed(*keys: str) -> OldFlag:
    return OldFlag(to=keys, translate=lambda words, said: dict.fromkeys(keys, words))


def _into(section: str, *names: str, prefix: str = "") -> dict[str, OldFlag]:
    """Returns flags that have moved into `section` and lost their prefix."""
    return {f"{prefix}{name}": _renamed(f"{section}.{name}") for name in names}


def _meaning(key: str, value: str) -> OldFlag:
    """Returns a switch that stands for one value of another flag."""

    def translate(words: Words, said: Said) -> Mapping[str, Words]:
        return {} if words and words[0].lower() in ("false", "no", "off", "0") else {key: (value,)}

    return OldFlag(to=(key,), translate=translate, bare=True)


def _converted(key: str, words_of: Callable[[Words, Said], Words]) -> OldFlag:
    return OldFlag(to=(key,), translate=lambda words, said: {key: words_of(words, said)})


def _symmetric(words: Words, said: Said) -> Words:
    """Uses a single bound for both sides."""
    return ("-" + words[0].lstrip("-"), words[0].lstrip("-")) if _is_one(words) else words


def _high_only(words: Words, said: Said) -> Words:
    return ("0", *words) if _is_one(words) else words


def _is_one(words: Words) -> bool:
    return len(words) == 1 and "," not in words[0]


def _correction_type(words: Words, said: Said) -> Words:
    return ("seq-mask-tis",) if words == ("mis",) else words


def _pair_loss(words: Words, said: Said) -> Words:
    """Translates a loss's name: every word but sigmoid meant the other loss."""
    return words if words == ("sigmoid",) else ("logexp",)


def _clip_low(words: Words, said: Said) -> Words:
    return words + said.get("clip_eps_high", said.get("eps_clip", ("0.2",)))


def _clip_high(words: Words, said: Said) -> Words:
    return said.get("clip_eps_low", said.get("eps_clip", ("0.2",))) + words


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


_COMMON: dict[str, OldFlag] = {
    **_into("eval", "dataset", "split", "steps", prefix="eval_"),
    **_into("data", "max_samples", "max_len", "disable_fast_tokenizer", "dataloader_num_workers"),
    "train_batch_size": _renamed("train.batch_size"),
    "micro_train_batch_size": _renamed("train.micro_batch_size"),
    "use_dynamic_batch": _renamed("train.dynamic_batch_enable"),
    "train_max_tokens_per_gpu": _renamed("train.max_tokens_per_gpu"),
    **_into("train", "max_epochs", "seed"),
    "full_determinism": _renamed("train.full_determinism_enable"),
    **_into("ds", "zero_stage", "param_dtype"),
    "data_type": _renamed("ds.param_dtype"),
    "bf16": _meaning("ds.param_dtype", "bf16"),
    **_into("ds", "zpg", "adam_offload", "grad_accum_dtype", "overlap_comm", "deepcompile"),
    **_into("ds", "ring_attn_size", "packing_samples", "attn_implementation"),
    **_into("ds", "use_liger_kernel", "load_in_4bit"),
    "ds_tensor_parallel_size": _renamed("ds.tensor_parallel_size"),
    "ring_head_stride": _renamed("ds.ring_attn_head_stride"),
    "flash_attn": _meaning("ds.attn_implementation", "flash_attention_2"),
    **_into("ds.lora", "rank", "alpha", "dropout", prefix="lora_"),
    "target_modules": _renamed("ds.lora.target_modules"),
    "use_ds_universal_ckpt": _renamed("ds.use_universal_ckpt"),
    "universal_ckpt": _renamed("ds.use_universal_ckpt"),
    "save_path": _renamed("ckpt.output_dir"),
    "ckpt_path": _renamed("ckpt.path"),
    "save_steps": _renamed("ckpt.save_steps"),
    "save_hf_ckpt": _renamed("ckpt.save_hf"),
    "disable_ds_ckpt": _renamed("ckpt.disable_ds"),
    "max_ckpt_num": _renamed("ckpt.max_num"),
    "max_ckpt_mem": _renamed("ckpt.max_mem"),
    "load_checkpoint": _renamed("ckpt.load_enable"),
    "logging_steps": _renamed("logger.logging_steps"),
    "use_wandb": _renamed("logger.wandb.key"),
    **_into("logger.wandb", "org", "group", "project", "run_name", prefix="wandb_"),
    "use_tensorboard": _renamed("logger.tensorboard_dir"),
    "torch_compile": OldFlag(bare=True, ignored="models are not compiled"),
    "perf": OldFlag(bare=True, ignored="timings are always logged"),
}

_SUPERVISED: dict[str, OldFlag] = _COMMON | {
    "pretrain": _renamed("model.model_name_or_path"),
    **_into("data", "dataset", "dataset_probs", "dataset_split"),
    "train_split": OldFlag(ignored="--data.dataset_split chooses the split"),
    "learning_rate": _renamed("adam.lr"),
    "adam_betas": _renamed("adam.betas"),
    "l2": _renamed("adam.weight_decay"),
    "gradient_checkpointing": _renamed("model.gradient_checkpointing_enable"),
    "gradient_checkpointing_use_reentrant": _renamed("model.gradient_checkpointing_reentrant"),
    "aux_loss_coef": _renamed("model.aux_loss_coef"),
}
_TEMPLATES = _into("data", "input_template", "apply_chat_template", "tokenizer_chat_template")
_PAIRS = _TEMPLATES | _into("data", "prompt_key", "chosen_key", "rejected_key")
_HEAD: dict[str, OldFlag] = {
    "value_head_prefix": _renamed("ds.value_head_prefix"),
    "value_prefix_head": _renamed("ds.value_head_prefix"),
    "head_prefix": _renamed("ds.value_head_prefix"),
}

SFT: dict[str, OldFlag] = (
    _SUPERVISED
    | _TEMPLATES
    | {
        **_into("data", "input_key", "output_key", "multiturn"),
        "pretrain_mode": _renamed("model.pretrain_mode_enable"),
    }
)
RM: dict[str, OldFlag] = (
    _SUPERVISED
    | _PAIRS
    | _HEAD
    | {
        "loss": _converted("model.loss_type", _pair_loss),
        "margin_loss": _renamed("model.margin_loss_enable"),
        "compute_fp32_loss": _renamed("model.compute_fp32_loss_enable"),
    }
)
DPO: dict[str, OldFlag] = (
    _SUPERVISED
    | _PAIRS
    | {
        "ref_pretrain": _renamed("ref.model_name_or_path"),
        "ref_offload": _renamed("ref.offload"),
        "beta": _renamed("model.beta"),
        "ipo": _renamed("model.ipo_enable"),
        **_into("model", "label_smoothing", "nll_loss_coef"),
    }
)
KTO: dict[str, OldFlag] = (
    _SUPERVISED
    | _TEMPLATES
    | {
        **_into("data", "input_key", "output_key", "label_key"),
        "ref_offload": _renamed("ref.offload"),
        **_into("model", "beta", "desirable_loss_weight", "undesirable_loss_weight"),
        "vanilla_loss": OldFlag(
            bare=True, removed="kto has no loss on pairs; use `openrlhf dpo`, or rows with a label"
        ),
    }
)
PRM: dict[str, OldFlag] = _SUPERVISED | _into(
    "data", "input_key", "label_key", "placeholder_token", "reward_tokens"
)
KD: dict[str, OldFlag] = SFT | {
    "teacher_model": _renamed("teacher.model_name_or_path"),
    "teacher_offload": _renamed("teacher.offload"),
    "kd_coef": _renamed("model.kd_coef"),
}

PPO: dict[str, OldFlag] = (
    _COMMON
    | _TEMPLATES
    | _HEAD
    | {
        # placement
        **_into("actor", "num_nodes", "num_gpus_per_node", prefix="actor_"),
        **_into("critic", "num_nodes", "num_gpus_per_node", prefix="critic_"),
        **_into("ref", "num_nodes", "num_gpus_per_node", prefix="ref_"),
        **_into("reward", "num_nodes", "num_gpus_per_node", prefix="reward_"),
        **_into("train", "colocate_actor_ref", "colocate_critic_reward", "async_queue_size"),
        "colocate_all_models": _renamed("train.colocate_all"),
        "async_train": _renamed("train.async_enable"),
        "partial_rollout": _renamed("train.partial_rollout_enable"),
        # engines
        **_into("vllm", "enable_prefix_caching", "enforce_eager"),
        **_into("vllm", "num_engines", "tensor_parallel_size", "enable_sleep", prefix="vllm_"),
        **_into("vllm", "sync_backend", "sync_with_ray", "gpu_memory_utilization", prefix="vllm_"),
        "deepspeed_enable_sleep": _renamed("ds.enable_sleep"),
        # sampling
        "rollout_batch_size": _renamed("rollout.batch_size"),
        **_into("rollout", "vllm_generate_batch_size", "n_samples_per_prompt", "temperature", "top_p"),
        "micro_rollout_batch_size": _renamed("rollout.micro_batch_size"),
        "rollout_micro_batch_size": _renamed("rollout.micro_batch_size"),
        "n_samples_per_prompts": _renamed("rollout.n_samples_per_prompt"),
        "generate_max_len": _renamed("rollout.max_new_tokens"),
        "max_new_tokens": _renamed("rollout.max_new_tokens"),
        "prompt_max_len": OldFlag(to=("data.max_len", "rollout.max_new_tokens"), translate=_prompt_length),
        "rollout_max_tokens_per_gpu": _renamed("rollout.max_tokens_per_gpu"),
        # data
        **_into("data", "input_key", "prompt_split", "label_key", "pretrain_split"),
        "prompt_data": _renamed("data.prompt_dataset"),
        "prompt_data_probs": _renamed("data.prompt_probs"),
        "pretrain_data": _renamed("data.pretrain_dataset"),
        "pretrain_data_probs": _renamed("data.pretrain_probs"),
        # evaluation
        **_into("eval", "temperature", "n_samples_per_prompt", prefix="eval_"),
        # training
        **_into("train", "num_episodes", "enable_ema", "ema_beta", "agent_func_path"),
        "max_steps": _renamed("train.max_turns"),
        # algorithm
        "advantage_estimator": _renamed("algo.advantage.estimator"),
        **_into("algo.advantage", "gamma", "lambd"),
        "no_advantage_std_norm": _renamed("algo.advantage.no_std_norm"),
        "enable_vllm_is_correction": _renamed("algo.advantage.is_correction_enable"),
        "vllm_is_correction_type": _converted("algo.advantage.is_correction_type", _correction_type),
        "use_icepop": _meaning("algo.advantage.is_correction_type", "icepop"),
        "vllm_is_truncated_threshold": _converted("algo.advantage.is_correction_threshold", _high_only),
        "init_kl_coef": _renamed("algo.kl.init_coef"),
        **_into("algo.kl", "target", "horizon", "estimator", prefix="kl_"),
        "use_kl_estimator_k3": _meaning("algo.kl.estimator", "k3"),
        "use_kl_loss": _renamed("algo.kl.use_loss"),
        "dynamic_filtering": _renamed("algo.dynamic_filtering_enable"),
        "dynamic_filtering_reward_range": _renamed("algo.dynamic_filtering_range"),
        # actor and critic
        "pretrain": _renamed("actor.model_name_or_path"),
        **_into("actor", "eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type"),
        **_into("actor", "aux_loss_coef", "ptx_coef"),
        "clip_eps_low": _converted("actor.eps_clip_low_high", _clip_low),
        "clip_eps_high": _converted("actor.eps_clip_low_high", _clip_high),
        "entropy_loss_coef": _renamed("actor.entropy_coef"),
        "gradient_checkpointing": _renamed("actor.gradient_checkpointing_enable"),
        "gradient_checkpointing_use_reentrant": _renamed("actor.gradient_checkpointing_reentrant"),
        "actor_learning_rate": _renamed("actor.adam.lr"),
        "critic_learning_rate": _renamed("critic.adam.lr"),
        "adam_betas": _renamed("actor.adam.betas", "critic.adam.betas"),
        "l2": _renamed("actor.adam.weight_decay", "critic.adam.weight_decay"),
        **{
            name: _renamed(f"actor.{name}", f"critic.{name}")
            for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
        },
        "critic_pretrain": _renamed("critic.model_name_or_path"),
        "freezing_actor_steps": _renamed("critic.freezing_steps"),
        **_into("critic", "value_clip", "save_value_network"),
        # reward
        "reward_pretrain": _renamed("reward.model_name_or_path"),
        "remote_rm_url": _renamed("reward.remote_url"),
        "normalize_reward": _renamed("reward.normalize_enable"),
        "reward_clip_range": _converted("reward.clip_range", _symmetric),
        **_into("reward", "overlong_buffer_len", "overlong_penalty_factor", "stop_properly_penalty_coef"),
        "ref_reward_offload": _renamed("ref.offload", "reward.offload"),
        # the rest
        "best_metric_key": _renamed("ckpt.best_metric_key"),
        "actor_init_on_gpu": OldFlag(bare=True, ignored="models are always loaded where they train"),
    }
)

_PRECISION = ("param_dtype", "data_type", "bf16", "attn_implementation", "flash_attn")
_INFERENCE: dict[str, OldFlag] = _TEMPLATES | {
    "pretrain": _renamed("model.model_name_or_path"),
    **_into("data", "max_len", "disable_fast_tokenizer"),
    **_into("rollout", "max_new_tokens", "temperature", "top_p", "repetition_penalty"),
    "greedy_sampling": _renamed("rollout.greedy"),
    "enable_csft": _renamed("csft.enable"),
    "csft_prompt": _renamed("csft.prompt"),
    "tp_size": _renamed("vllm.tensor_parallel_size"),
    "seed": _renamed("train.seed"),
    **{name: _COMMON[name] for name in _PRECISION},
}
BATCH_INFERENCE: dict[str, OldFlag] = (
    _INFERENCE
    | _HEAD
    | {
        "eval_task": _renamed("task"),
        **_into("data", "dataset", "dataset_probs", "dataset_split", "max_samples"),
        **_into("data", "input_key", "output_key", "prompt_max_len"),
        "best_of_n": _renamed("rollout.n_samples_per_prompt"),
        "rollout_batch_size": _renamed("rollout.batch_size"),
        "normalize_reward": _renamed("reward.normalize_enable"),
        "reward_template": _renamed("reward.template"),
        **_into("vllm", "max_num_seqs", "enable_prefix_caching"),
        "zero_stage": _renamed("ds.zero_stage"),
        "micro_batch_size": _renamed("train.micro_batch_size"),
        "full_determinism": _renamed("train.full_determinism_enable"),
    }
)
SERVE_RM: dict[str, OldFlag] = _HEAD | {
    "reward_pretrain": _renamed("reward.model_name_or_path"),
    "normalize_reward": _renamed("reward.normalize_enable"),
    **_into("data", "max_len", "disable_fast_tokenizer"),
    **{name: _COMMON[name] for name in (*_PRECISION, "load_in_4bit", "packing_samples")},
}
CHAT = _INFERENCE | _into("ds", "load_in_4bit") | _into("rollout", "engine")
LORA_COMBINER: dict[str, OldFlag] = {name: _COMMON[name] for name in ("param_dtype", "data_type", "bf16")}

_OF_OTHERS = """
    num_generations=rollout.n_samples_per_prompt max_completion_length=rollout.max_new_tokens
    max_length=data.max_len learning_rate=actor.adam.lr
    per_device_train_batch_size=train.micro_batch_size gradient_accumulation_steps=train.batch_size
    num_train_epochs=train.num_episodes|train.max_epochs num_iterations=train.max_epochs
    beta=algo.kl.init_coef epsilon=actor.eps_clip epsilon_high=actor.eps_clip_low_high
    reward_funcs=reward.remote_url max_grad_norm=actor.max_norm|max_norm
    resume_from_checkpoint=ckpt.load_enable report_to=logger.trackers lora_r=ds.lora.rank
    actor_rollout_ref.model.path=actor.model_name_or_path
    custom_reward_function.path=reward.remote_url data.train_batch_size=rollout.batch_size
    actor_rollout_ref.rollout.n=rollout.n_samples_per_prompt lr=actor.adam.lr|adam.lr
    train_files=data.prompt_dataset|data.dataset val_files=eval.dataset
    max_response_length=rollout.max_new_tokens ppo_mini_batch_size=train.batch_size
    ppo_micro_batch_size_per_gpu=train.micro_batch_size ppo_epochs=train.max_epochs
    tensor_model_parallel_size=vllm.tensor_parallel_size clip_ratio=actor.eps_clip
    kl_coef=algo.kl.init_coef adv_estimator=algo.advantage.estimator
    total_epochs=train.num_episodes|train.max_epochs save_freq=ckpt.save_steps test_freq=eval.steps
    n_gpus_per_node=actor.num_gpus_per_node nnodes=actor.num_nodes
"""
_PAIRS = (pair.partition("=") for pair in _OF_OTHERS.split())
OTHER_NAMES: dict[str, str] = {name: keys for name, _, keys in _PAIRS}
"""Maps names of TRL and verl to the current flags with their meaning, of which a command has one."""
