"""What is wrong between flags, found before any process starts.

Nothing here changes a setting: what follows from others is a property of the configuration, and what
contradicts others is refused with the remedy.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.config.choices import GROUP_ESTIMATORS, LR_SCHEDULERS, WHITENING_ESTIMATORS
from openrlhf.config.fields import fields_of, to_words, values_of
from openrlhf.config.parse import Explicit, Problem
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import CkptConfig, LoggerConfig, OptimConfig
from openrlhf.config.supervised import SFTConfig


def sft_problems(config: SFTConfig, explicit: Explicit) -> list[Problem]:
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // (
        config.ds.ring_attn_size * config.ds.tensor_parallel_size
    )
    return _first_of_each(
        [
            *_not_yet(config),
            *_required(config, "model.model_name_or_path", "data.dataset"),
            *_models(config, "model.model_name_or_path"),
            *_datasets(config, ("data.dataset", "data.dataset_probs"), ("eval.dataset", None)),
            *_template(config, explicit),
            *_sft_responses(config),
            *_optimizer("", config),
            *_batches(config, max(ranks, 1), None, ""),
            *_precision(config),
            *_output(config.ckpt, config.logger),
            *_unread(config, explicit, COMMON_UNREAD + SFT_UNREAD),
        ]
    )


def ppo_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    return _first_of_each(
        [
            *_not_yet(config),
            *_ppo_not_yet(config),
            *_required(config, "actor.model_name_or_path", "data.prompt_dataset"),
            *_models(
                config, "actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path"
            ),
            *_datasets(config, ("data.prompt_dataset", "data.prompt_probs"), ("eval.dataset", None)),
            *_template(config, explicit),
            *_reward_source(config),
            *_reward_shaping(config),
            *_estimator(config),
            *_kl(config, explicit),
            *_lengths(config),
            *_optimizer("actor.", config.actor),
            *(_optimizer("critic.", config.critic) if config.uses_critic else ()),
            *_batches(config, config.data_parallel_size, config.samples_per_step, _made(config)),
            *_placement(config, explicit),
            *_precision(config),
            *_output(config.ckpt, config.logger),
            *_unread(config, explicit, COMMON_UNREAD + PPO_UNREAD),
        ]
    )


NOT_YET: Mapping[str, str] = {
    "reward.model_name_or_path": "a reward model is",
    "reward.normalize_enable": "reward normalisation is",
    "train.agent_func_path": "the agent interface is",
    "train.max_turns": "the agent interface is",
    "train.async_enable": "asynchronous training is",
    "train.partial_rollout_enable": "partial rollout is",
    "train.enable_ema": "the moving average is",
    "algo.dynamic_filtering_enable": "dynamic filtering is",
    "actor.optim": "Muon is",
    "actor.aux_loss_coef": "the MoE balance loss is",
    "actor.freeze_visual_encoder": "training with images is",
    "data.max_images_per_prompt": "training with images is",
    "vllm.sync_with_ray": "weight sync with ray.util.collective is",
    "optim": "Muon is",
    "model.aux_loss_coef": "the MoE balance loss is",
    "ds.lora.rank": "LoRA is",
    "ds.load_in_4bit": "4-bit training is",
    "ds.use_liger_kernel": "the Liger kernel is",
    "ds.ring_attn_size": "ring attention is",
    "ds.tensor_parallel_size": "tensor parallel training is",
    "ds.deepcompile": "DeepCompile is",
    "ds.use_universal_ckpt": "the universal checkpoint is",
    "use_ms": "ModelScope is",
}
"""Flags whose feature does not exist yet: anything but the default is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """Flags that nothing reads under a condition. Set by today's name to something but the default they are
    refused; set by an old name they are remarked upon, because commands of older versions must run."""

    keys: tuple[str, ...]
    """Whole names, or beginnings that end with a dot."""
    when: Callable[[Any], bool]
    why: str
    fatal: bool = True
    """False: only remarked upon, because it says nothing about the algorithm: memory, placement, logging."""

    def covers(self, key: str) -> bool:
        return any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)


COMMON_UNREAD = (
    Unread(
        keys=("ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules"),
        when=lambda c: c.ds.lora.rank == 0,
        why="LoRA is off (ds.lora.rank 0)",
    ),
    Unread(
        keys=("ds.ring_attn_head_stride",),
        when=lambda c: c.ds.ring_attn_size == 1,
        why="ring attention is off (ds.ring_attn_size 1)",
    ),
    Unread(keys=("ds.zpg",), when=lambda c: c.ds.zero_stage < 3, why="only ds.zero_stage 3 shards weights"),
    Unread(
        keys=("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
        when=lambda c: not c.train.dynamic_batch_enable,
        why="train.dynamic_batch_enable is off",
    ),
    Unread(
        keys=("train.micro_batch_size", "rollout.micro_batch_size"),
        when=lambda c: c.train.dynamic_batch_enable,
        why="train.dynamic_batch_enable fills rows by tokens",
        fatal=False,
    ),
    Unread(
        keys=("data.tokenizer_chat_template",),
        when=lambda c: not c.data.apply_chat_template,
        why="data.apply_chat_template is off",
    ),
    Unread(
        keys=("data.input_template",),
        when=lambda c: c.data.apply_chat_template and c.data.input_template is not None,
        why="data.apply_chat_template formats the rows",
    ),
    Unread(
        keys=("eval.",),
        when=lambda c: c.eval.dataset is None,
        why="there is no eval.dataset",
        fatal=False,
    ),
    Unread(
        keys=("ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_num", "ckpt.max_mem"),
        when=lambda c: c.ckpt.save_steps < 1,
        why="no checkpoints are written (ckpt.save_steps)",
        fatal=False,
    ),
    Unread(
        keys=("logger.wandb.org", "logger.wandb.group", "logger.wandb.project"),
        when=lambda c: c.logger.wandb.key is None,
        why="W&B is off (logger.wandb.key)",
        fatal=False,
    ),
)

SFT_UNREAD = (
    Unread(keys=("muon.",), when=lambda c: c.optim == "adam", why="the optimizer is adam"),
    Unread(
        keys=("min_lr_ratio",),
        when=lambda c: not c.lr_scheduler.endswith("_with_min_lr"),
        why="the schedule has no floor; lr_scheduler cosine_with_min_lr has one",
    ),
    Unread(
        keys=("model.gradient_checkpointing_reentrant",),
        when=lambda c: not c.model.gradient_checkpointing_enable,
        why="model.gradient_checkpointing_enable is off",
    ),
    Unread(
        keys=("ds.enable_sleep",), when=lambda c: True, why="supervised training shares its GPUs with nobody"
    ),
)

PPO_UNREAD = (
    Unread(
        keys=("critic.num_nodes", "critic.num_gpus_per_node", "train.colocate_critic_reward"),
        when=lambda c: not c.uses_critic,
        why="only estimator gae has a critic",
        fatal=False,
    ),
    Unread(keys=("critic.",), when=lambda c: not c.uses_critic, why="only estimator gae has a critic"),
    Unread(
        keys=("algo.advantage.lambd",),
        when=lambda c: c.algo.advantage.estimator != "gae",
        why="only estimator gae looks ahead",
    ),
    Unread(
        keys=("algo.advantage.no_std_norm",),
        when=lambda c: c.algo.advantage.estimator not in WHITENING_ESTIMATORS,
        why=f"only the estimators {', '.join(WHITENING_ESTIMATORS)} divide advantages by their deviation",
    ),
    Unread(
        keys=("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold"),
        when=lambda c: not c.algo.advantage.is_correction_enable,
        why="algo.advantage.is_correction_enable is off",
    ),
    Unread(
        keys=("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold"),
        when=lambda c: c.actor.policy_loss_type == "gspo",
        why="gspo puts the sampler's probabilities into its ratio, without a weight to bound",
    ),
    Unread(
        keys=("algo.kl.target", "algo.kl.horizon", "algo.kl.estimator", "algo.kl.use_loss"),
        when=lambda c: not c.uses_reference,
        why="there is no KL penalty (algo.kl.init_coef 0)",
    ),
    Unread(
        keys=("algo.kl.horizon",),
        when=lambda c: c.algo.kl.target is None,
        why="without algo.kl.target the weight stays",
    ),
    Unread(
        keys=("algo.dynamic_filtering_range",),
        when=lambda c: not c.algo.dynamic_filtering_enable,
        why="algo.dynamic_filtering_enable is off",
    ),
    Unread(
        keys=("ref.", "train.colocate_actor_ref"),
        when=lambda c: not c.uses_reference,
        why="there is no reference model (algo.kl.init_coef 0)",
        fatal=False,
    ),
    Unread(
        keys=("actor.eps_clip",),
        when=lambda c: c.actor.eps_clip_low_high is not None,
        why="actor.eps_clip_low_high sets both bounds",
    ),
    Unread(keys=("actor.muon.",), when=lambda c: c.actor.optim == "adam", why="the optimizer is adam"),
    Unread(keys=("critic.muon.",), when=lambda c: c.critic.optim == "adam", why="the optimizer is adam"),
    Unread(
        keys=("actor.min_lr_ratio",),
        when=lambda c: not c.actor.lr_scheduler.endswith("_with_min_lr"),
        why="the schedule has no floor; actor.lr_scheduler cosine_with_min_lr has one",
    ),
    Unread(
        keys=("critic.min_lr_ratio",),
        when=lambda c: not c.critic.lr_scheduler.endswith("_with_min_lr"),
        why="the schedule has no floor; critic.lr_scheduler cosine_with_min_lr has one",
    ),
    Unread(
        keys=("actor.gradient_checkpointing_reentrant",),
        when=lambda c: not c.actor.gradient_checkpointing_enable,
        why="actor.gradient_checkpointing_enable is off",
    ),
    Unread(
        keys=("reward.overlong_penalty_factor",),
        when=lambda c: c.reward.overlong_buffer_len is None,
        why="reward.overlong_buffer_len is not set",
    ),
    Unread(
        keys=("reward.num_nodes", "reward.num_gpus_per_node", "reward.offload"),
        when=lambda c: c.reward.model_name_or_path is None,
        why="there is no reward model",
        fatal=False,
    ),
    Unread(
        keys=("ds.value_head_prefix",),
        when=lambda c: not c.uses_critic and c.reward.model_name_or_path is None,
        why="there is neither a critic nor a reward model",
        fatal=False,
    ),
    Unread(
        keys=("vllm.enable_sleep",),
        when=lambda c: not c.engines_sleep,
        why="engines have their own GPUs without train.colocate_all",
        fatal=False,
    ),
    Unread(
        keys=("vllm.gpu_memory_utilization",),
        when=lambda c: c.vllm.kv_cache_gb is not None,
        why="vllm.kv_cache_gb sets the size",
        fatal=False,
    ),
    Unread(
        keys=("train.async_queue_size",),
        when=lambda c: not c.train.async_enable,
        why="train.async_enable is off",
    ),
    Unread(keys=("train.ema_beta",), when=lambda c: not c.train.enable_ema, why="train.enable_ema is off"),
    Unread(
        keys=("data.image_key",),
        when=lambda c: c.data.max_images_per_prompt == 0,
        why="data.max_images_per_prompt is 0",
    ),
    Unread(
        keys=("ckpt.best_metric_key",),
        when=lambda c: c.eval.dataset is None,
        why="without eval.dataset there is no metric",
        fatal=False,
    ),
)


def _first_of_each(problems: list[Problem]) -> list[Problem]:
    """One problem for each flag: the first is the cause, later ones follow from it."""
    first: dict[str, Problem] = {}
    for problem in sorted(problems, key=lambda problem: not problem.fatal):
        first.setdefault(problem.key, problem)
    return list(first.values())


def _not_yet(config: Any) -> Iterator[Problem]:
    defaults = values_of(type(config)())
    for key, value in values_of(config).items():
        if key in NOT_YET and value != defaults[key]:
            yield Problem(key=key, text=f"{NOT_YET[key]} not available yet; {_back_to(defaults[key])}")


def _back_to(default: Any) -> str:
    unset = default is None or default is False
    return "remove it" if unset else f"leave it at {' '.join(to_words(default))}"


def _ppo_not_yet(config: PPOConfig) -> Iterator[Problem]:
    if config.uses_critic:
        yield Problem(
            key="algo.advantage.estimator",
            text="a critic is not available yet; choose reinforce, or with several samples for each prompt "
            f"one of {', '.join(GROUP_ESTIMATORS)}",
        )
    if any(url.startswith(("http://", "https://")) for url in config.reward.urls):
        yield Problem(
            key="reward.remote_url",
            text="rewards over HTTP are not available yet; "
            "name a .py file with reward_func(queries, prompts, labels)",
        )
    if config.rollout.vllm_generate_batch_size not in (None, config.rollout.batch_size):
        yield Problem(
            key="rollout.vllm_generate_batch_size",
            text="generating ahead is not available yet; "
            f"leave it at rollout.batch_size {config.rollout.batch_size}",
        )


def _unread(config: Any, explicit: Explicit, table: tuple[Unread, ...]) -> Iterator[Problem]:
    values, defaults = values_of(config), values_of(type(config)())
    for key, source in explicit.items():
        if source.shared or values[key] == defaults[key]:
            continue
        for row in table:
            if row.covers(key) and row.when(config):
                if row.fatal and not source.old:
                    yield Problem(key=key, text=f"nothing would read it: {row.why}; remove it")
                else:
                    yield Problem(key=key, text=f"has no effect: {row.why}", fatal=False)
                break


def _required(config: Any, *keys: str) -> Iterator[Problem]:
    values = values_of(config)
    for key in keys:
        if not values[key]:
            yield Problem(
                key=key, text=f"is required: {fields_of(type(config))[key].help.removesuffix(' Required.')}"
            )


def _models(config: Any, *keys: str) -> Iterator[Problem]:
    values = values_of(config)
    for key in keys:
        for name in (values[key] or "").split(","):
            if _looks_local(name) and not os.path.isdir(name):
                text = f"{_missing(name, values[key])}; give the folder of a model, or a name on the hub"
                yield Problem(key=key, text=text)


def _datasets(config: Any, *keys: tuple[str, str | None]) -> Iterator[Problem]:
    values = values_of(config)
    for key, probs in keys:
        items = split_spec(values[key] or "")
        for item in items:
            if _looks_local(item) and not os.path.exists(path := _dataset_path(item)):
                yield Problem(key=key, text=_missing(path, values[key]))
        if probs and values[probs] is not None:
            yield from _probabilities(probs, values[probs], key, len(items))


def split_spec(spec: str) -> list[str]:
    """The items of a comma list of datasets. A path that exists may itself have commas."""
    pieces, items = spec.split(","), []
    while pieces:
        sizes = range(len(pieces), 1, -1)
        size = next((n for n in sizes if os.path.exists(_dataset_path(",".join(pieces[:n]).strip()))), 1)
        items.append(",".join(pieces[:size]).strip())
        pieces = pieces[size:]
    return [item for item in items if item]


def _dataset_path(item: str) -> str:
    """`path@data_dir`, unless the whole exists."""
    whole = os.path.expanduser(item)
    path, at, data_dir = whole.rpartition("@")
    return os.path.join(path, data_dir) if at and not os.path.exists(whole) else whole


def _probabilities(key: str, text: str, dataset_key: str, count: int) -> Iterator[Problem]:
    try:
        probs = [float(word) for word in text.split(",")]
    except ValueError:
        yield Problem(key=key, text="expects numbers with commas between them, as 0.7,0.3")
        return
    if len(probs) != count:
        yield Problem(
            key=key, text=f"has {len(probs)} probabilities for {count} in {dataset_key}; give one for each"
        )
    elif min(probs) < 0 or abs(sum(probs) - 1) > 1e-6:
        yield Problem(key=key, text=f"must be at least 0 and add up to 1; they add up to {sum(probs):g}")


_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py")


def _looks_local(name: str) -> bool:
    """Not a name on the hub, which is `name` or `owner/name`."""
    name = name.partition("@")[0]
    local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(_FILE_ENDINGS)
    return local and "://" not in name


def _missing(path: str, said: str) -> str:
    """`said` is the whole value of the flag, which the message shows anyway."""
    name = "" if path == said else f"{path} "
    if path.startswith("~"):
        return "~ is only understood by the shell; write the whole path"
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        return f"{name}does not exist, nor does the folder {parent}"
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(parent), n=3)
    return f"{name}does not exist" + (f"; near it: {', '.join(near)}" if near else "")


def _template(config: Any, explicit: Explicit) -> Iterator[Problem]:
    key, template = "data.input_template", config.data.input_template
    if template is None or key not in explicit or config.data.apply_chat_template:
        return
    try:
        has_place = template.format("<prompt>") != template.format("")
    except (KeyError, IndexError, ValueError):
        yield Problem(key=key, text="must have one {} for the prompt; write other braces twice: {{ }}")
        return
    if not has_place:
        yield Problem(key=key, text="has no {} for the prompt to go to; use None for the prompt alone")
    elif "\\n" in template:
        yield Problem(
            key=key,
            text=r"has a backslash and an n, not a line break; in bash write $'...\n...'",
            fatal=False,
        )


def _sft_responses(config: SFTConfig) -> Iterator[Problem]:
    data, pretrain = config.data, config.model.pretrain_mode_enable
    if data.multiturn and not data.apply_chat_template:
        yield Problem(key="data.multiturn", text="needs messages; add --data.apply_chat_template")
    elif data.multiturn and pretrain:
        yield Problem(
            key="data.multiturn",
            text="contradicts model.pretrain_mode_enable, which trains on all tokens; remove one",
        )
    if data.output_key is None and not data.apply_chat_template and not pretrain:
        yield Problem(
            key="data.output_key",
            text="nothing says what the response is: name its column, or use --data.apply_chat_template\n"
            "(the last message is the response) or --model.pretrain_mode_enable (loss on all tokens)",
        )


def _reward_source(config: PPOConfig) -> Iterator[Problem]:
    key, reward = "reward.remote_url", config.reward
    if not (reward.urls or reward.model_name_or_path or config.train.agent_func_path):
        yield Problem(
            key=key, text="nothing gives a reward; name a .py file with reward_func(queries, prompts, labels)"
        )
    for url in reward.urls:
        if not url.startswith(("http://", "https://")):
            yield from _python_file(key, url, alone=len(reward.urls) == 1)
    if config.train.agent_func_path is not None:
        yield from _python_file("train.agent_func_path", config.train.agent_func_path, alone=True)


def _python_file(key: str, path: str, *, alone: bool) -> Iterator[Problem]:
    if not alone:
        yield Problem(key=key, text=f"{path} must stand alone: one .py file, or several http URLs")
    elif not path.endswith(".py"):
        yield Problem(key=key, text="is neither a .py file nor a URL that starts with http:// or https://")
    elif not os.path.isfile(path):
        yield Problem(key=key, text=_missing(path, path))


def _reward_shaping(config: PPOConfig) -> Iterator[Problem]:
    yield from _rising("reward.clip_range", config.reward.clip_range)
    buffer, longest = config.reward.overlong_buffer_len, config.longest_response
    if buffer is not None and buffer > longest:
        name = "rollout.max_new_tokens" if config.rollout.max_new_tokens else "data.max_len"
        yield Problem(
            key="reward.overlong_buffer_len", text=f"is more than {name} {longest}; use at most {longest}"
        )


def _rising(key: str, bounds: tuple[float, float]) -> Iterator[Problem]:
    if bounds[0] >= bounds[1]:
        yield Problem(key=key, text="the first bound must be less than the second")


def _estimator(config: PPOConfig) -> Iterator[Problem]:
    advantage = config.algo.advantage
    yield from _rising("algo.advantage.is_correction_threshold", advantage.is_correction_threshold)
    yield from _rising("algo.dynamic_filtering_range", config.algo.dynamic_filtering_range)
    samples = config.rollout.n_samples_per_prompt
    if advantage.estimator in GROUP_ESTIMATORS:
        if samples == 1:
            yield Problem(
                key="rollout.n_samples_per_prompt",
                text=f"estimator {advantage.estimator} compares the samples of one prompt; use 2 or more",
            )
        if advantage.gamma != 1:
            yield Problem(
                key="algo.advantage.gamma",
                text=f"estimator {advantage.estimator} does not discount; remove it, or choose reinforce",
            )
    if config.algo.dynamic_filtering_enable and samples == 1:
        yield Problem(
            key="algo.dynamic_filtering_enable",
            text="filters groups; rollout.n_samples_per_prompt must be 2 or more",
        )
    if config.train.partial_rollout_enable and not config.train.async_enable:
        yield Problem(key="train.partial_rollout_enable", text="needs --train.async_enable")


def _kl(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    kl = config.algo.kl
    if not config.uses_reference or not {"algo.kl.estimator", "algo.kl.use_loss"} & set(explicit):
        return
    if kl.use_loss and kl.estimator == "k1":
        yield Problem(
            key="algo.kl.estimator",
            text="as a loss its gradient is zero on average; k2 or k3 suit",
            fatal=False,
        )
    if not kl.use_loss and kl.estimator != "k1":
        yield Problem(key="algo.kl.estimator", text="in the reward k1 is the unbiased estimate", fatal=False)


def _lengths(config: PPOConfig) -> Iterator[Problem]:
    new, longest = config.rollout.max_new_tokens, config.data.max_len
    if new is not None and new >= longest:
        yield Problem(
            key="rollout.max_new_tokens",
            text=f"leaves no room for a prompt in data.max_len {longest}, which counts both; raise that",
        )


def _optimizer(prefix: str, optim: OptimConfig) -> Iterator[Problem]:
    if optim.lr_scheduler not in LR_SCHEDULERS:
        near = difflib.get_close_matches(optim.lr_scheduler, LR_SCHEDULERS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(LR_SCHEDULERS)}"
        yield Problem(key=f"{prefix}lr_scheduler", text=f"there is no such schedule; {remedy}")


def _made(config: PPOConfig) -> str:
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    return f"a step makes {prompts} prompts x {samples} = {prompts * samples} samples"


def _batches(config: Any, ranks: int, samples: int | None, made: str) -> Iterator[Problem]:
    """Every RL step fills whole optimizer steps, every rank takes the same number of sequences, in full rows.
    `samples`: what one RL step makes, described by `made`; None in supervised learning."""
    batch, micro = config.train.batch_size, config.train.micro_batch_size
    dynamic = config.train.dynamic_batch_enable

    def wrong(batch: int) -> str:
        if samples is not None and samples % batch:
            return f"{made}, which is not a multiple of it"
        if batch % ranks:
            return f"does not divide among {ranks} ranks"
        if not dynamic and batch // ranks > micro and batch // ranks % micro:
            return f"is not a multiple of {ranks} ranks x train.micro_batch_size {micro} = {ranks * micro}"
        return ""

    if text := wrong(batch):
        start = batch if samples is None else min(batch, samples + 1)
        below = next((n for n in range(start - 1, max(0, start - _SEARCH), -1) if not wrong(n)), None)
        end = batch + _SEARCH if samples is None else min(batch + _SEARCH, samples + 1)
        above = next((n for n in range(batch + 1, end) if not wrong(n)), None)
        near = " or ".join(str(n) for n in (below, above) if n is not None)
        other = "train.micro_batch_size" if samples is None else "rollout.batch_size"
        yield Problem(key="train.batch_size", text=f"{text}; use {near or f'another {other}'}")


_SEARCH = 10_000
"""How far from a wrong batch size a right one is looked for."""


def _placement(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    roles = {
        "ref": (config.uses_reference, config.ref_shares_actor),
        "critic": (config.uses_critic, config.train.colocate_all),
        "reward": (config.reward.model_name_or_path is not None, config.train.colocate_all),
    }
    values = values_of(config)
    for role, (runs, shares) in roles.items():
        for name in ("num_nodes", "num_gpus_per_node") if runs else ():
            key, actors = f"{role}.{name}", values[f"actor.{name}"]
            if shares and key in explicit and values[key] not in (0, actors):
                yield Problem(key=key, text=f"shares the GPUs of the actor, which has {actors}; remove it")
            if not shares and values[key] == 0:
                yield Problem(
                    key=key, text="0 means the actor's GPUs; add --train.colocate_all, or give it some"
                )
    gpus, per_engine = config.actor.num_gpus, config.vllm.tensor_parallel_size
    if config.train.colocate_all and config.num_engines * per_engine != gpus:
        fits = f"use {gpus // per_engine}" if gpus % per_engine == 0 else "change vllm.tensor_parallel_size"
        yield Problem(
            key="vllm.num_engines",
            text=f"{config.num_engines} engines x {per_engine} GPUs must be the actor's {gpus} GPUs "
            f"with train.colocate_all; {fits}",
        )
    if config.eval.dataset is not None and config.eval.steps < 1:
        yield Problem(
            key="eval.dataset", text="is never used: eval.steps is -1; set --eval.steps N", fatal=False
        )


def _precision(config: Any) -> Iterator[Problem]:
    ds = config.ds
    if ds.adam_offload and ds.zero_stage == 0:
        yield Problem(
            key="ds.adam_offload", text="needs sharded optimizer states; use --ds.zero_stage 1, 2 or 3"
        )
    if ds.param_dtype == "fp32" and "flash_attention" in ds.attn_implementation:
        yield Problem(
            key="ds.attn_implementation",
            text="flash attention has no float32; use auto, or ds.param_dtype bf16",
        )


def _output(ckpt: CkptConfig, logger: LoggerConfig) -> Iterator[Problem]:
    if ckpt.save_steps > 0 and ckpt.disable_ds and not ckpt.save_hf:
        yield Problem(
            key="ckpt.disable_ds",
            text="leaves nothing to save every ckpt.save_steps; add --ckpt.save_hf, or remove it",
        )
    folders = {
        "ckpt.output_dir": ckpt.output_dir,
        "ckpt.path": ckpt.path,
        "logger.tensorboard_dir": logger.tensorboard_dir,
        "logger.run_dir": logger.run_dir,
    }
    for key, folder in folders.items():
        if folder is not None and os.path.isfile(folder):
            yield Problem(key=key, text="is a file; name a folder")
    if logger.wandb.key == "***":
        yield Problem(key="logger.wandb.key", text="is a mask, not a key; use True and set WANDB_API_KEY")
