"""Batches of reward requests and their parts."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.base import Reward, RewardError
from openrlhf.rewards.calls import BatchedReward, BatchFailed, Call
from openrlhf.rewards.remote import RemoteReward

TIMEOUT = 20.0
"""Seconds after which a call without an answer fails a test."""


class Faulty(BatchedReward):
    """Fails each batch that has one of the labels `bad`. The reward of a sample is its query's number."""

    def __init__(self, bad: Sequence[int], alone: bool = False) -> None:
        super().__init__(batch_size=8, concurrency=1)
        self.bad, self.alone = set(bad), alone
        self.asked: list[list[int]] = []

    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        self.asked.append([call.label for call in calls])
        if self.bad & {call.label for call in calls}:
            raise BatchFailed("it failed", alone=self.alone)
        return [Reward(reward=float(call.query), score=0.0) for call in calls]


def answers(source: Faulty, count: int) -> list:
    async def ask() -> list:
        calls = [source(str(10 * i), "", i) for i in range(count)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), TIMEOUT)

    return [a.reward if isinstance(a, Reward) else type(a) for a in asyncio.run(ask())]


@pytest.mark.parametrize(
    ("bad", "alone", "asked"),
    [
        ([], False, [[0, 1, 2, 3]]),
        ([1], False, [[0, 1, 2, 3], [0, 1], [2, 3], [0], [1]]),
        ([1], True, [[0, 1, 2, 3], [0], [1], [2], [3]]),
        ([0, 3], False, [[0, 1, 2, 3], [0, 1], [2, 3], [0], [1], [2], [3]]),
    ],
)
def test_only_faulty_samples_fail(bad: list[int], alone: bool, asked: list[list[int]]) -> None:
    source = Faulty(bad, alone)
    assert answers(source, 4) == [RewardError if i in bad else 10.0 * i for i in range(4)]
    assert source.asked == asked


def test_batches_have_their_largest_size() -> None:
    source = Faulty([])
    assert answers(source, 19) == [10.0 * i for i in range(19)]
    assert source.asked == [list(range(8)), list(range(8, 16)), [16, 17, 18]]


class Broken(Faulty):
    """Returns a reward too few for the first batch, and raises `error` for the second."""

    error: BaseException = KeyError("no such thing")

    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        rewards = await super().ask(calls)
        if len(self.asked) == 2:
            raise self.error
        return rewards[1:] if len(self.asked) == 1 else rewards


@pytest.mark.parametrize(
    ("error", "told"), [(KeyError("it"), KeyError), (GeneratorExit(), asyncio.CancelledError)]
)
def test_an_error_of_any_kind_ends_its_calls_and_no_others(error: BaseException, told: type) -> None:
    source = Broken([])
    source.error = error
    assert answers(source, 20) == [ValueError] * 8 + [told] * 8 + [160.0, 170.0, 180.0, 190.0]


def test_every_server_is_asked_and_none_is_asked_for_nothing():
    """Five samples go to three servers; the reward of each is that of the server that was asked for it."""
    urls = [f"http://server{i}/get_reward" for i in range(3)]
    posted: list[tuple[str, int]] = []

    class Servers(RemoteReward):
        async def _post(self, url: str, body: bytes, count: int) -> list[Any]:
            posted.append((url, count))
            return [SimpleNamespace(reward=url)] * count

    async def ask() -> list:
        reward = Servers(urls, timeout=5.0, batch_size=1)
        return await asyncio.gather(*(reward(f"text {i}", "text", "") for i in range(5)))

    answers = asyncio.run(ask())
    assert Counter(count for _, count in posted) == {1: 5}
    assert Counter(url for url, _ in posted) == Counter([*urls, *urls[:2]])
    assert Counter(answer.reward for answer in answers) == Counter(url for url, _ in posted)
