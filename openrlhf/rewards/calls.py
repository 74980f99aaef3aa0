"""Rewards that are asked for one sample at a time, and handed over in batches. A batch that fails is asked
for again in halves, so that only the sample to blame fails."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.base import Reward, RewardError

WINDOW = 0.005
"""Seconds that the first sample of a batch waits for others."""


class BatchFailed(Exception):
    """Half of the samples may fare better: one of them may be to blame, or all together are too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A sample whose reward somebody waits for."""

    query: str
    prompt: str
    label: Any
    reward: asyncio.Future[Reward]

    def finish(self, result: Reward | Exception) -> None:
        """Unless nobody waits for it any more."""
        if self.reward.done():
            return
        if isinstance(result, Exception):
            self.reward.set_exception(result)
        else:
            self.reward.set_result(result)


class BatchedReward(ABC):
    """Hands over samples that finish within a few milliseconds, or while all lanes are busy, together."""

    def __init__(self, *, batch_size: int, concurrency: int) -> None:
        """`batch_size`: samples in one batch at most. `concurrency`: lanes, that is, batches under way at
        most."""
        self.batch_size, self.concurrency = batch_size, concurrency
        self._waiting: deque[Call] = deque()
        self._halves: deque[Sequence[Call]] = deque()
        self._lanes: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        """The reward of each. Raises BatchFailed where fewer samples may fare better, RewardError where every
        one of these has failed."""

    async def __call__(self, query: str, prompt: str, label: Any) -> Reward:
        """Raises RewardError with what went wrong."""
        reward = asyncio.get_running_loop().create_future()
        self._waiting.append(Call(query=query, prompt=prompt, label=label, reward=reward))
        self._open_lane()
        return await reward

    def close(self) -> None:
        """Stop what is under way. In the event loop of the calls."""
        for call in self._waiting:
            call.reward.cancel()
        for call in (call for half in self._halves for call in half):
            call.reward.cancel()
        self._waiting.clear()
        self._halves.clear()
        for lane in self._lanes:
            lane.cancel()

    def _open_lane(self) -> None:
        if sum(not lane.done() for lane in self._lanes) < self.concurrency:
            lane = asyncio.get_running_loop().create_task(self._work())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)

    async def _work(self) -> None:
        """Until nobody waits."""
        if not self._halves and len(self._waiting) < self.batch_size:
            await asyncio.sleep(WINDOW)
        while calls := self._take():
            await self._answer(calls)

    def _take(self) -> Sequence[Call]:
        if self._halves:
            return self._halves.popleft()
        return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    async def _answer(self, calls: Sequence[Call]) -> None:
        """Bring every call its reward or what went wrong, or leave it in a smaller batch."""
        try:
            rewards = await self.ask(calls)
        except BatchFailed as error:
            if len(calls) == 1:
                calls[0].finish(RewardError(str(error)))
                return
            middle = len(calls) // 2
            self._halves += [calls[:middle], calls[middle:]]
            self._open_lane()
        except RewardError as error:
            for call in calls:  # to each an error of its own: raising one adds to its traceback
                call.finish(RewardError(str(error)))
        except asyncio.CancelledError:
            for call in calls:
                call.reward.cancel()
            raise
        except Exception as error:
            for call in calls:
                call.finish(error)
        else:
            for call, reward in zip(calls, rewards, strict=True):
                call.finish(reward)
