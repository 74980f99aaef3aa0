"""Batches reward requests, which arrive one sample at a time. A failed batch is split and retried, so that
only the faulty sample fails."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.base import Reward, RewardError

WINDOW = 0.005
"""Seconds that the first sample of a batch waits for further ones."""


class BatchFailed(Exception):
    """Raised for a failed batch that is worth splitting: one sample may be faulty, or the batch too large."""

    def __init__(self, problem: str, *, alone: bool = False) -> None:
        """`alone`: retry each sample alone instead of halves. It is for failures that are expensive: a time
        limit that is over, a process that must start again."""
        super().__init__(problem)
        self.alone = alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A sample that waits for its reward."""

    query: str
    prompt: str
    label: Any
    reward: asyncio.Future[Reward]

    def finish(self, result: Reward | Exception) -> None:
        """Sets the result, unless the call was cancelled."""
        if self.reward.done():
            return
        if isinstance(result, Exception):
            self.reward.set_exception(result)
        else:
            self.reward.set_result(result)


class BatchedReward(ABC):
    """A reward source that receives samples in batches: those that arrive within a few milliseconds, or while
    the maximum number of batches is in flight."""

    def __init__(self, *, batch_size: int, concurrency: int) -> None:
        """`batch_size`: maximum samples in a batch. `concurrency`: maximum batches in flight, each in a task
        of its own (a lane)."""
        self.batch_size, self.concurrency = batch_size, concurrency
        self._waiting: deque[Call] = deque()
        self._parts: deque[Sequence[Call]] = deque()
        self._lanes: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        """Returns the reward of each call. Raises BatchFailed if smaller batches may succeed, and RewardError
        if no sample can."""

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        """Returns the reward of one sample. Raises RewardError with the cause."""
        reward = asyncio.get_running_loop().create_future()
        self._waiting.append(Call(query=query, prompt=prompt, label=label, reward=reward))
        self._open_lane()
        return await reward

    def close(self) -> None:
        """Cancels all calls. Call it in the event loop in which they run."""
        for call in self._waiting:
            call.reward.cancel()
        for call in (call for part in self._parts for call in part):
            call.reward.cancel()
        self._waiting.clear()
        self._parts.clear()
        for lane in self._lanes:
            lane.cancel()

    def _open_lane(self) -> None:
        if sum(not lane.done() for lane in self._lanes) < self.concurrency:
            lane = asyncio.get_running_loop().create_task(self._work())
            self._lanes.add(lane)
            lane.add_done_callback(self._close_lane)

    def _close_lane(self, lane: asyncio.Task[None]) -> None:
        self._lanes.discard(lane)
        if self._waiting or self._parts:  # it ended by an error: another lane takes its place
            self._open_lane()

    async def _work(self) -> None:
        """Runs a lane: processes batches until no call is waiting."""
        if not self._parts and len(self._waiting) < self.batch_size:
            await asyncio.sleep(WINDOW)
        while calls := self._take():
            await self._answer(calls)

    def _take(self) -> Sequence[Call]:
        if self._parts:
            return self._parts.popleft()
        return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    async def _answer(self, calls: Sequence[Call]) -> None:
        """Sets the reward or the error of every call, or queues parts of the batch."""
        try:
            rewards = list(zip(calls, await self.ask(calls), strict=True))
        except BatchFailed as error:
            if len(calls) == 1:
                calls[0].finish(RewardError(str(error)))
                return
            middle = len(calls) // 2
            parts = [[call] for call in calls] if error.alone else [calls[:middle], calls[middle:]]
            self._parts += parts
            for _ in parts:
                self._open_lane()
        except RewardError as error:
            for call in calls:  # a separate error for each: raising one extends its traceback
                call.finish(RewardError(str(error)))
        except Exception as error:
            for call in calls:
                call.finish(error)
        except BaseException:  # cancelled, or the process ends: nobody waits for ever
            for call in calls:
                call.reward.cancel()
            raise
        else:
            for call, reward in rewards:
                call.finish(reward)
