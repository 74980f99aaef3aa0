"""Users' reward functions: checked before the run, and called in processes of their own. One that hangs,
crashes, raises or returns nonsense fails only the samples in question."""

import ast
import atexit
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.rollout.calls import BatchedReward, Call
from openrlhf.rollout.reward_process import RewardProcess
from openrlhf.utils.agent import Reward


def check_reward_file(path: str, flag: str) -> None:
    """Raise ValueError, without running the file, where it cannot be a reward file."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except SyntaxError as error:
        raise ValueError(f"{flag} {path}: line {error.lineno}: {error.msg}") from error
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
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
    """Every sample's own reward is 0: a teacher judges its tokens, or reward models are asked later."""

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        return Reward(reward=0.0, score=0.0)

    def close(self) -> None:
        pass


class RewardFunction(BatchedReward):
    """`reward_func` of a file, in processes that each work on one batch at a time."""

    def __init__(self, path: str, *, timeout: float, num_workers: int = 1, batch_size: int = 1) -> None:
        """`timeout`: seconds for one call of the function, after which its process is killed. `batch_size`:
        samples in one call at most."""
        super().__init__(batch_size=batch_size, concurrency=num_workers)
        path = str(Path(path).resolve())
        self._processes = [RewardProcess(path, timeout=timeout) for _ in range(num_workers)]
        self._idle = deque(self._processes)
        atexit.register(self._stop)  # before multiprocessing waits for processes that wait for calls

    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        process = self._idle.popleft()  # there are as many as lanes, and they take turns
        try:
            return await process.ask(
                [call.query for call in calls],
                [call.prompt for call in calls],
                [call.label for call in calls],
            )
        finally:
            self._idle.append(process)

    def close(self) -> None:
        super().close()
        self._stop()
        atexit.unregister(self._stop)

    def _stop(self) -> None:
        for process in self._processes:
            process.stop()
