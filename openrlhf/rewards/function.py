"""Checks users' reward functions before the run, and calls them in separate processes. If a call hangs,
crashes, raises an error or returns an invalid value, only its samples fail."""

import asyncio
import atexit
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.agents.base import Reward, RewardError
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rewards.calls import BatchedReward, Call
from openrlhf.rewards.process import RewardProcess, load_reward_func
from openrlhf.user_file import resolved

IMPORT_LIMIT = 60.0
"""Seconds that the check before a run waits for an import. Engines wait longer: user_file.IMPORT_DEADLINE."""


def check_reward_file(reference: str, flag: str, limit: float = IMPORT_LIMIT) -> str:
    """Checks a reward function with `check_file`."""
    return check_file(reference, flag, load_reward_func, limit)


def check_file(reference: str, flag: str, load: Callable[[str], Any], limit: float) -> str:
    """Imports the file or module in a temporary process.

    Returns a remark if the import took more than `limit` seconds, otherwise "". Raises UsageError with the
    line number if the import fails or `load` finds nothing callable.
    """
    process = RewardProcess(reference, timeout=limit, load=load)

    async def ready() -> None:
        async with asyncio.timeout(limit):
            await process.ready()

    try:
        asyncio.run(ready())
    except TimeoutError:
        return f"{flag} {reference}: its import takes more than {limit:g} s, so it could not be checked"
    except RewardError as error:
        text = str(error).removeprefix(f"{reference}: ")
        raise UsageError(ErrorCode.USER_CODE, text, flag=flag, value=reference) from None
    finally:
        process.stop()
    return ""


class NoReward:
    """A reward of 0 for every sample, for runs whose rewards come from a teacher or from reward models."""

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        return Reward(reward=0.0, score=0.0)

    def close(self) -> None:
        pass


class RewardFunction(BatchedReward):
    """A user's reward function in several processes, each of which handles one batch at a time."""

    def __init__(
        self,
        reference: str,
        *,
        timeout: float,
        num_workers: int = 1,
        batch_size: int = 1,
        memory_gb: float | None = None,
    ) -> None:
        """`timeout`: seconds for one call of the function, after which its process is killed. `batch_size`:
        maximum samples in one call. `memory_gb`: memory of each process; None: that of the machine."""
        super().__init__(batch_size=batch_size, concurrency=num_workers)
        reference = resolved(reference)
        self._processes = [
            RewardProcess(reference, timeout=timeout, memory_gb=memory_gb) for _ in range(num_workers)
        ]
        self._idle = deque(self._processes)
        atexit.register(self._stop)  # at exit multiprocessing would wait for these processes forever

    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        process = self._idle.popleft()  # never empty: as many processes as lanes
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
