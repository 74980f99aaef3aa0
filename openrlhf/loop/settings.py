"""Settings of a user's own loop: the flags of `openrlhf ppo`, with defaults for one process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.config.command import Explicit, Problem
from openrlhf.config.commands import PPO
from openrlhf.config.fields import to_words, values_of
from openrlhf.config.parse import Invocation, parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import loop_problems

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
CONSTANT = {"actor.lr_scheduler": "constant", "actor.lr_warmup_ratio": 0.0}
"""The schedule of a loop of unknown length."""


def read_settings(
    config: str | os.PathLike | None, flags: Mapping[str, Any], *, steps: int | None
) -> Invocation[PPOConfig]:
    """Returns the configuration of a run in one process. `config`: a YAML file; `flags` override it. `steps`:
    see `Run`. Raises UsageError that lists all problems."""
    argv = [] if config is None else ["--config", os.fspath(config)]
    for name, value in flags.items():
        argv += [f"--{SHORT.get(name, name)}", *to_words(tuple(value) if isinstance(value, list) else value)]
    defaults = LOCAL | (CONSTANT if steps is None else {})

    def resolve(config: PPOConfig, explicit: Explicit, cluster: Sequence[int]) -> dict[str, Any]:
        unset = {key: value for key, value in defaults.items() if key not in explicit}
        return {key: value for key, value in unset.items() if values_of(config)[key] != value}

    command = replace(PPO, problems=loop_problems, placed=_placed(steps))
    return parse(command, argv, resolve=resolve, raises=True)


def _placed(steps: int | None) -> Callable[[PPOConfig, Explicit], list[Problem]]:
    def problems(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
        values = values_of(config)
        for key in SIZES:
            if values[key] != 1:
                yield Problem(key, "a run in one process has one rank and one engine; leave it out")
        if steps is None and (name := config.actor.lr_scheduler) != "constant":
            text = f"{name} needs the number of optimizer steps: Run(..., steps=N)"
            yield Problem("actor.lr_scheduler", text)

    return lambda config, explicit: list(problems(config, explicit))
