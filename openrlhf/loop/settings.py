"""Settings of a user's own loop: the flags of `openrlhf ppo`; in one process with defaults of its own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from openrlhf.config.command import Explicit, Problem
from openrlhf.config.fields import find_flag, flag_values, to_words
from openrlhf.config.parse import Invocation, parse, to_arguments
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import loop_problems, ppo_placement_problems
from openrlhf.config.ppo_command import PPO
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop import machines

SHORT = {"actor": "actor.model_name_or_path", "lr": "actor.adam.lr"}
"""Short names of flags in Python."""
SIZES = (
    *(
        f"{role}.{size}"
        for role in ("actor", "critic", "ref", "reward", "teacher")
        for size in ("num_nodes", "num_gpus_per_node")
    ),
    *("vllm.num_engines", "vllm.tensor_parallel_size", "vllm.pipeline_parallel_size"),
    *("ds.ring_attn_size", "ds.tensor_parallel_size"),
)
"""Flags that count processes, all 1 in one process."""
LOCAL = {"rollout.engine": "transformers", "train.backend": "torch", **dict.fromkeys(SIZES, 1)}
_SHAPE = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
CONSTANT = {f"{role}.{name}": value for name, value in _SHAPE.items() for role in ("actor", "critic")}
"""The schedules of a loop of unknown length."""


Placement = Literal["local", "ray"]


def read_settings(
    config: str | os.PathLike | Mapping[str, Any] | None,
    flags: Mapping[str, Any],
    *,
    steps: int | None,
    placement: Placement,
) -> Invocation[PPOConfig]:
    """Returns the configuration of a run. `flags` override those of `config`. All arguments: see `Run`.
    Raises UsageError that lists all problems."""
    if placement not in get_args(Placement):
        text = f"expects {' or '.join(get_args(Placement))}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="placement", value=placement)
    flags, argv = dict(_dotted(flags)), []
    if isinstance(config, Mapping):
        flags = dict(_dotted(config)) | flags
    elif isinstance(config, str | os.PathLike):
        argv = ["--config", os.fspath(config)]
    elif config is not None:
        text = "expects the name of a YAML file, or a dict of flags"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="config", value=config)
    for short, value in flags.items():
        name = SHORT.get(short, short)
        if name != short and name in flags:
            raise UsageError(ErrorCode.CONFLICT, f"is the same flag as {name}; leave out one", flag=short)
        if value is None and (flag := find_flag(PPOConfig, name)) and flag.type is str:
            raise UsageError(ErrorCode.INVALID_VALUE, "is None; give a value, or leave it out", flag=short)
        argv += to_arguments(name, to_words(tuple(value) if isinstance(value, list) else value))
    is_local = placement == "local"
    defaults = (LOCAL if is_local else {}) | (CONSTANT if steps is None else {})

    def resolve(config: PPOConfig, explicit: Explicit, cluster: Sequence[int]) -> dict[str, Any]:
        unset = {key: value for key, value in defaults.items() if key not in explicit}
        chosen = {key: value for key, value in unset.items() if flag_values(config)[key] != value}
        return chosen if is_local else machines.resolve(config, explicit, cluster) | chosen

    def placed(config: PPOConfig, explicit: Explicit) -> list[Problem]:
        of_ranks = _set_one_process(config) if is_local else ppo_placement_problems(config, explicit)
        return [*of_ranks, *_set_schedule(config, steps)]

    command = replace(PPO, problems=loop_problems, placed=placed)
    return parse(command, argv, resolve=resolve, raises=True)


def _dotted(flags: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields flags of nested mappings by their whole names. A flag may itself have a mapping as its value."""
    for name, value in flags.items():
        if isinstance(value, Mapping) and not find_flag(PPOConfig, prefix + name):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _set_one_process(config: PPOConfig) -> Iterator[Problem]:
    values = flag_values(config)
    if values["train.max_restarts"]:
        yield Problem(
            "train.max_restarts", 'one process has no other to lose; leave it out, or place on "ray"'
        )
    for key in SIZES:
        if values[key] != 1:
            yield Problem(
                key, 'in one process there is one rank and one engine; leave it out, or place on "ray"'
            )


def _set_schedule(config: PPOConfig, steps: int | None) -> Iterator[Problem]:
    for role in ("actor", "critic") if config.uses_critic else ("actor",):
        if steps is None and (name := getattr(config, role).lr_scheduler) != "constant":
            text = f"{name} needs the number of optimizer steps: Run(..., steps=N)"
            yield Problem(f"{role}.lr_scheduler", text)
