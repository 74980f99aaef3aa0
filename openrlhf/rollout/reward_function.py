"""Users' reward functions, in worker processes: one that hangs is killed, one that crashes is replaced, and
either way, or when it raises or returns nonsense, only the samples in question fail."""

import ast
import asyncio
import importlib.util
import math
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from openrlhf.utils.agent import Reward, RewardError


def check_reward_file(path: str, flag: str) -> None:
    """Raise ValueError, without running the file, where it cannot be a reward file."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except SyntaxError as error:
        raise ValueError(f"{flag} {path}: line {error.lineno}: {error.msg}") from error
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "reward_func" not in names:
        found = f"it defines {', '.join(sorted(names))}" if names else "it defines no function"
        raise ValueError(
            f"{flag} {path}: the file has no reward_func ({found}).\n"
            f"Define `def reward_func(queries, prompts, labels)` that returns {{'rewards': [...]}}."
        )


class NoReward:
    """Every sample's own reward is 0: a teacher judges its tokens."""

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        return Reward(reward=0.0, score=0.0)

    def close(self) -> None:
        pass


class RewardFunction:
    """`reward_func` of a file, called for one sample at a time."""

    def __init__(self, path: str, *, timeout: float, num_workers: int = 1) -> None:
        """`timeout`: seconds for one call, after which its process is killed."""
        self.path, self.timeout = str(Path(path).resolve()), timeout
        self.pool = ProcessPool(
            max_workers=num_workers,
            initializer=_load,
            initargs=(self.path,),
            # Not fork: this process runs vLLM's and Ray's threads.
            context=multiprocessing.get_context("spawn"),
        )

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        """Raises RewardError with what went wrong."""
        future = self.pool.schedule(_call, args=([query], [prompt], [label]), timeout=self.timeout)
        try:
            return (await asyncio.wrap_future(future))[0]
        except TimeoutError as error:
            raise RewardError(
                f"{self.path}: reward_func took longer than --reward.timeout {self.timeout:g} s"
            ) from error
        except ProcessExpired as error:
            raise RewardError(
                f"{self.path}: reward_func's process died with exit code {error.exitcode}"
            ) from error

    def close(self) -> None:
        self.pool.stop()
        self.pool.join()


_reward_func: Callable[[list[str], list[str], list[Any]], Any]
"""The user's function, in a worker process, or what tells why there is none."""


def _load(path: str) -> None:
    global _reward_func
    try:
        spec = importlib.util.spec_from_file_location("reward_func", path)
        assert spec is not None and spec.loader is not None  # as of every .py file
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _reward_func = module.reward_func
    except (Exception, SystemExit):  # raised here it would break the pool, and only the log would say why
        text = traceback.format_exc(limit=-3)

        def _reward_func(queries, prompts, labels):
            raise RewardError(f"{path} could not be imported:\n{text}")


def _call(queries: list[str], prompts: list[str], labels: list[Any]) -> list[Reward]:
    try:
        answer = _reward_func(queries, prompts, labels)
    except RewardError:
        raise
    except (Exception, SystemExit):
        # The user's own traceback is what helps; the exception itself may not survive the way between
        # processes.
        raise RewardError(f"reward_func raised:\n{traceback.format_exc(limit=-3)}") from None
    return read_rewards(answer, len(queries))


def read_rewards(answer: Any, count: int, source: str = "reward_func") -> list[Reward]:
    """What a reward function or a reward server may return, as one Reward for each sample. Raises
    RewardError for anything else, which names the `source`.

    {"rewards": list or tensor of n, "scores": the same (optional), "extra_logs": {name: scalar or n values}
    (optional)}, or the rewards alone.
    """
    if not isinstance(answer, dict):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(
            f"{source} returned a dict without 'rewards'; it has {', '.join(map(repr, answer)) or 'nothing'}"
        )
    rewards = _floats("rewards", answer["rewards"], count, source)
    scores = rewards if answer.get("scores") is None else _floats("scores", answer["scores"], count, source)
    extra_logs = answer.get("extra_logs") or {}
    if not isinstance(extra_logs, dict):
        raise RewardError(f"{source} returned extra_logs that are not a dict: {extra_logs!r}")
    logs = {
        name: _floats(f"extra_logs[{name!r}]", value, count, source, scalar_is_for_all=True)
        for name, value in extra_logs.items()
    }
    return [
        Reward(
            reward=rewards[i], score=scores[i], extra_logs={name: values[i] for name, values in logs.items()}
        )
        for i in range(count)
    ]


def _floats(name: str, value: Any, count: int, source: str, scalar_is_for_all: bool = False) -> list[float]:
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value] * (count if scalar_is_for_all else 1)
    if len(value) != count:
        raise RewardError(f"{source} returned {len(value)} {name} for {count} samples")
    try:
        floats = [float(v) for v in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{source} returned {name} that are not numbers: {error}") from error
    if not all(math.isfinite(f) for f in floats):
        raise RewardError(f"{source} returned {name} that are not finite: {floats}")
    return floats
