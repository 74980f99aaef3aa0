"""Effects of changed flags on a resumed run. A flag in none of the tables here decides what is learned and
must not change."""

from collections.abc import Mapping
from enum import Enum


class Change(Enum):
    """The effect of a changed flag on a resume."""

    FREE = "free"
    """The run resumes: placement, memory, layout, logging, saving and evaluation may change."""
    REMARKED = "remarked"
    """The run resumes with a remark on the effect."""
    CONTENT = "content"
    """The run resumes if the content that the flag names is the same; its path may change."""
    REFUSED = "refused"


def change_of(command: str, key: str) -> Change:
    """Returns the effect of a change of flag `key`. `command`: as in `openrlhf NAME`."""
    if key in remarks_of(command):
        return Change.REMARKED
    if key in CONTENT:
        return Change.CONTENT
    if key in CHANGEABLE or key.startswith(CHANGEABLE_SECTIONS):
        return Change.FREE
    return Change.REFUSED


def remarks_of(command: str) -> Mapping[str, str]:
    """Maps flags to remarks on the effect of another value."""
    return RL_REMARKS if command == "ppo" else SUPERVISED_REMARKS


_LENGTH = (
    "the length of the run changes; from here on the learning rate follows the schedule of the new length"
)
SUPERVISED_REMARKS = {"train.max_epochs": _LENGTH, "train.max_steps": _LENGTH}
RL_REMARKS = {
    "train.num_episodes": _LENGTH,
    "train.max_steps": _LENGTH,
    "reward.remote_url": "if the reward source changed, rewards before and after cannot be compared",
    "train.agent_func_path": "if the agent changed, episodes and rewards before and after cannot be compared",
}

CONTENT = {
    *("model.model_name_or_path", "ref.model_name_or_path", "teacher.model_name_or_path"),
    *("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path"),
    *("data.dataset", "data.prompt_dataset", "data.pretrain_dataset"),
}

SHAPES = {
    *(f"{model}model_name_or_path" for model in ("model.", "actor.", "critic.")),
    *(f"{model}freeze_visual_encoder" for model in ("model.", "actor.")),
    *("optim", "actor.optim", "critic.optim", "train.backend", "train.enable_ema"),
    *("ds.param_dtype", "ds.grad_accum_dtype", "ds.tensor_parallel_size", "ds.load_in_4bit"),
    *("ds.lora.rank", "ds.lora.target_modules", "ds.value_head_prefix"),
}
"""Flags that shape the tensors of a checkpoint: a fork cannot change them."""
ORDER = {
    *("data.dataset", "data.prompt_dataset", "train.seed", "algo.dynamic_filtering_enable"),
    "rollout.batch_size",
}
"""Flags that decide which rows a step reads: a fork that changes one begins the data at the first row.
`train.batch_size` is one in supervised commands."""
CHANGEABLE_SECTIONS = ("ckpt.", "eval.", "logger.")
CHANGEABLE = {
    *("local_rank", "use_ms", "placement"),
    *("data.image_root", "data.image_hosts"),
    *("data.dataloader_num_workers", "data.cache_enable", "data.cache_dir"),
    # Ranks, and the state that each of them keeps
    *(f"{role}.num_nodes" for role in ("actor", "critic", "ref", "teacher", "reward")),
    *(f"{role}.num_gpus_per_node" for role in ("actor", "critic", "ref", "teacher", "reward")),
    *("ds.zero_stage", "ds.adam_offload"),
    *("ref.offload", "teacher.offload", "reward.offload", "ref.precompute_enable"),
    *("train.colocate_all", "train.colocate_actor_ref", "train.colocate_critic_reward"),
    *("rollout.engine", "vllm.num_engines", "vllm.tensor_parallel_size", "vllm.pipeline_parallel_size"),
    *("vllm.sync_backend", "vllm.sync_with_ray"),
    *("vllm.sync_bucket_mb", "vllm.lora_sync", "vllm.sync_check_steps", "algo.max_mismatch"),
    *("vllm.enable_prefix_caching", "vllm.enforce_eager", "vllm.enable_sleep"),
    *("vllm.gpu_memory_utilization", "vllm.kv_cache_gb"),
    # Rows: how a step's samples are laid out.
    *("train.micro_batch_size", "train.dynamic_batch_enable", "train.max_tokens_per_gpu"),
    *("rollout.micro_batch_size", "rollout.max_tokens_per_gpu", "ds.packing_samples"),
    *("ds.ring_attn_size", "ds.ring_attn_head_stride", "ds.sequence_parallel_mode", "ds.share_prefixes"),
    # Memory and kernels
    *(f"{model}.gradient_checkpointing_enable" for model in ("model", "actor", "critic")),
    *(f"{model}.gradient_checkpointing_reentrant" for model in ("model", "actor")),
    *("ds.zpg", "ds.overlap_comm", "ds.deepcompile", "ds.use_liger_kernel", "ds.use_universal_ckpt"),
    *("ds.bucket_mb", "ds.activation_offload"),
    *("ds.attn_implementation", "ds.experts_implementation", "train.full_determinism_enable"),
    *("ds.enable_sleep", "model.compute_fp32_loss_enable"),
    # Reward requests, and limits at which a run aborts
    *("reward.batch", "reward.timeout", "reward.num_workers", "reward.memory_gb"),
    "reward.remote_try_timeout",
    *("reward.remote_timeout", "reward.remote_batch_size", "reward.remote_concurrency"),
    *(
        "rollout.max_concurrent_episodes",
        "rollout.episode_timeout",
        "rollout.step_timeout",
        "rollout.retries",
        "rollout.retry_on",
        "rollout.stop_on",
        "train.placement_timeout",
        "train.grace_seconds",
        "train.rank_timeout",
        "train.max_restarts",
        "rollout.engine_timeout",
    ),
    *(
        "train.on_nonfinite",
        "train.verify_steps",
        "train.hooks",
        "reward.max_failed_ratio",
        "algo.dynamic_filtering_max_batches",
    ),
    "critic.save_value_network",
}
