"""Flags of older versions, of Molt, of TRL and of verl with their current meaning. Those of one command stand
beside its declaration. `flag value` is a value of a current or old flag that has another name now."""

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


def renamed(table: str) -> dict[str, OldFlag]:
    """Reads a table of old names. A line is `section: old=new ...`: `--old` is now `--section.new`; `=new` is
    left out where the name has not changed. Several sections mean that all of them get the value. `section_:`
    means that old names began with the section's last word."""
    flags: dict[str, OldFlag] = {}
    for line in table.strip().splitlines():
        sections, _, names = line.strip().rpartition(": ")
        prefix = sections.rpartition(".")[2] if sections.endswith("_") else ""
        for name in names.split():
            old, _, new = name.partition("=")
            keys = [f"{section}.{new or old}".strip(".") for section in sections.rstrip("_").split(",")]
            flags[prefix + old] = converted(*keys)
    return flags


def converted(*keys: str, words_of: Callable[[Words, Said], Words] = lambda words, said: words) -> OldFlag:
    """Returns a flag that sets `keys` to its words, or to what `words_of` makes of them."""
    return OldFlag(to=keys, translate=lambda words, said: dict.fromkeys(keys, words_of(words, said)))


def switch(key: str, value: str) -> OldFlag:
    """Returns a switch that stands for one value of another flag."""

    def translate(words: Words, said: Said) -> Mapping[str, Words]:
        return {} if words and words[0].lower() in ("false", "no", "off", "0") else {key: (value,)}

    return OldFlag(to=(key,), translate=translate, bare=True)


def value(key: str, new: str) -> OldFlag:
    """Returns a value that is now the value `new` of `key`."""
    return converted(key, words_of=lambda words, said: (new,))


def removed(table: str) -> dict[str, OldFlag]:
    """Reads a table of flags and values that are refused. A line is `flag, flag: remedy`."""
    rows = (line.strip().partition(": ") for line in table.strip().splitlines())
    return {name: OldFlag(removed=remedy) for names, _, remedy in rows for name in names.split(", ")}


PRECISION: dict[str, OldFlag] = {
    **renamed("ds: param_dtype data_type=param_dtype"),
    "bf16": switch("ds.param_dtype", "bf16"),
}
KERNELS: dict[str, OldFlag] = {
    **renamed("ds: attn_implementation"),
    "flash_attn": switch("ds.attn_implementation", "flash_attention_2"),
}
TRAINING: dict[str, OldFlag] = {
    **renamed("""
        eval_: dataset split steps
        data: max_samples max_len disable_fast_tokenizer dataloader_num_workers
        train: train_batch_size=batch_size micro_train_batch_size=micro_batch_size
        train: use_dynamic_batch=dynamic_batch_enable train_max_tokens_per_gpu=max_tokens_per_gpu
        train: max_epochs seed full_determinism=full_determinism_enable
        ds: zero_stage zpg adam_offload grad_accum_dtype overlap_comm deepcompile ring_attn_size
        ds: packing_samples use_liger_kernel load_in_4bit ds_tensor_parallel_size=tensor_parallel_size
        ds: ring_head_stride=ring_attn_head_stride use_ds_universal_ckpt=use_universal_ckpt
        ds: universal_ckpt=use_universal_ckpt
        ds.lora_: rank alpha dropout
        ds.lora: target_modules
        ckpt: save_path=output_dir ckpt_path=path save_steps save_hf_ckpt=save_hf disable_ds_ckpt=disable_ds
        ckpt: max_ckpt_num=max_num max_ckpt_mem=max_mem load_checkpoint=load_enable
        logger: logging_steps use_wandb=wandb.key use_tensorboard=tensorboard_dir
        logger.wandb_: org group project run_name
    """),
    **PRECISION,
    **KERNELS,
    "torch_compile": OldFlag(bare=True, ignored="models are not compiled"),
    "perf": OldFlag(bare=True, ignored="timings are always logged"),
}
MOLT: dict[str, OldFlag] = {
    **renamed("""
        : fsdp.tp_size=ds.tensor_parallel_size fsdp.cp_size=ds.ring_attn_size fsdp.param_dtype=ds.param_dtype
        : fsdp.attn_implementation=ds.attn_implementation fsdp.packing_samples=ds.packing_samples
        : fsdp.offload=ds.adam_offload
    """),
    "fsdp.attn_implementation te": value("ds.attn_implementation", "auto"),
    "fsdp.offload none": value("ds.adam_offload", "false"),
    "fsdp.offload optimizer": value("ds.adam_offload", "true"),
    **removed("""
        fsdp.offload full: weights are not offloaded; use --ds.adam_offload --ds.zero_stage 3
        fsdp.ep_size: there is no expert parallelism; --ds.zero_stage 3 shards the experts
        fsdp.pp_size: training has no pipeline; --ds.zero_stage 3 shards the layers
        fsdp.sequence_parallel: use --ds.ring_attn_size, which splits sequences over ranks
        ckpt.dcp_max_num: --ckpt.max_num counts checkpoints together with their Hugging Face copies
        ckpt.disable_final_save: the final model is always written; remove it
    """),
}
"""Flags that all commands of Molt share."""


def molt_model(section: str) -> dict[str, OldFlag]:
    """Returns Molt's flags of the trained model, whose flags are in `section`."""
    old, new = f"{section}.gradient_checkpoint", f"{section}.gradient_checkpointing_enable"
    return {
        **renamed(f": {section}.lora_dim=ds.lora.rank {section}.lora_alpha=ds.lora.alpha {old}={new}"),
        f"{section}.lora_target_modules": converted(
            "ds.lora.target_modules",
            words_of=lambda patterns, said: tuple(name.removeprefix("*.") for name in patterns),
        ),
        **{
            f"{old} {mode}": value(new, "false" if mode != "full" else "true")
            for mode in ("full", "none", "off")
        },
        **removed(f"{old} selective: layers are recomputed whole; use {new}"),
    }


TEMPLATES = renamed("data: input_template apply_chat_template tokenizer_chat_template")
HEAD = renamed("ds: value_head_prefix value_prefix_head=value_head_prefix head_prefix=value_head_prefix")

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
