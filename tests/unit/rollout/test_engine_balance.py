"""Choice of the engine that gets the next prompt, in simulated time."""

import heapq
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from records import trajectory

from openrlhf.rollout.dispatch import LENGTH_WINDOW, SAMPLES_IN_FLIGHT, Balance, _num_answered
from openrlhf.types import Prompt, PromptGroup, Work, count_work, no_work

SLOTS = 256
"""Samples that an engine decodes at a time, with one token of each in a unit of time."""
Groups = list[tuple[Prompt, list[int]]]
"""Prompts, and the number of tokens of each of their samples."""


def prompt(i: int = 0, num_tokens: int = 0) -> Prompt:
    return Prompt(prompt_id=i, text="", num_tokens=num_tokens)


def groups_of(count: int, size: int, seed: int, sigma: float = 1.0) -> Groups:
    """Draws log-normal lengths, 1000 on average, 8192 at most."""
    draw = random.Random(seed)
    mu = math.log(1000) - sigma**2 / 2
    length = lambda: max(1, min(8192, round(draw.lognormvariate(mu, sigma))))
    return [(prompt(i, 500), [length() for _ in range(size)]) for i in range(count)]


@dataclass
class Engine:
    """Engine whose samples wait in line for a slot."""

    running: list[tuple[int, int]] = field(default_factory=list)
    """End and group of each running sample."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Number of tokens and group of each waiting sample."""
    done: Work = field(default_factory=no_work)

    def take(self, now: int, group: int, lengths: list[int]) -> None:
        self.waiting.extend((length, group) for length in lengths)
        self._fill(now)

    def finish_one(self) -> tuple[int, int]:
        now, group = heapq.heappop(self.running)
        self._fill(now)
        return now, group

    def _fill(self, now: int) -> None:
        while self.waiting and len(self.running) < SLOTS:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (now + length, group))


class ByGroups(Balance):
    """Counts a group's samples until all of them have finished, as one must where engines report nothing
    more."""

    of_group: Work

    def merge_report(self, number: int, done: Work) -> None:
        self.done[number] += self.of_group


def makespan(groups: Groups, num_engines: int, build: Callable[[int, int], Balance]) -> tuple[int, list[int]]:
    """Returns the time at which the last sample finishes, and the number of groups that each engine had."""
    balance, engines = build(num_engines, 8192), [Engine() for _ in range(num_engines)]
    left, had, now = [len(lengths) for _, lengths in groups], [0] * num_engines, 0
    waiting = deque(range(len(groups)))
    while True:
        while waiting and (number := balance.least_busy(left[waiting[0]])) is not None:
            i = waiting.popleft()
            balance.sent[number] += count_work(groups[i][0], "train", left[i])
            engines[number].take(now, i, groups[i][1])
            had[number] += 1
        busy = [(engine.running[0][0], number) for number, engine in enumerate(engines) if engine.running]
        if not busy:
            return now, had
        engine = engines[number := min(busy)[1]]
        now, i = engine.finish_one()
        asked, lengths = groups[i]
        engine.done += count_work(asked, "train", 1)
        left[i] -= 1
        if not left[i]:
            if isinstance(balance, ByGroups):
                balance.of_group = count_work(asked, "train", len(lengths))
            balance.merge_report(number, engine.done)
            balance.update_expected_length("train", len(lengths), sum(lengths))


@pytest.mark.processes
@pytest.mark.parametrize(("size", "sigma", "most"), [(8, 1.0, 0.95), (16, 1.5, 0.8), (64, 1.5, 0.9)])
def test_engines_are_kept_full(size: int, sigma: float, most: float) -> None:
    """The baseline counts whole groups, most of whose samples have finished long before the last one."""
    drawn = [groups_of(8192 // size, size, seed, sigma) for seed in range(2)]
    ours, theirs = ([makespan(groups, 8, build)[0] for groups in drawn] for build in (Balance, ByGroups))
    assert statistics.mean(ours) < most * statistics.mean(theirs)
    floors = [sum(sum(lengths) for _, lengths in groups) / (8 * SLOTS) for groups in drawn]
    # all slots are in use all the time
    assert all(span >= floor for span, floor in zip(ours, floors, strict=True))


def test_none_of_hundreds_of_engines_starves() -> None:
    _, had = makespan(groups_of(1024, 4, 0), 512, Balance)
    assert min(had) == max(had) == 2  # all fit at once


def test_a_prompt_goes_where_fewest_tokens_are_left() -> None:
    balance = Balance(3, longest=100)
    for number, (num_tokens, num_samples) in enumerate([(10, 4), (500, 1), (0, 5)]):
        balance.sent[number] += count_work(prompt(num_tokens=num_tokens), "train", num_samples)
    # 4 x (10 + 100), 500 + 100, 5 x 100
    assert balance.least_busy(1) == 0 and balance.least_busy(1, avoided=[0]) == 2
    balance.update_expected_length("train", 2, 20)  # 4 x (10 + 10), 500 + 10, 5 x 10
    assert balance.least_busy(1) == 2
    balance.merge_report(1, count_work(prompt(num_tokens=500), "train", 1))
    assert balance.least_busy(1) == 1
    balance.merge_report(1, no_work())  # a late report
    assert balance.least_busy(1) == 1


def test_evaluation_is_expected_to_be_as_long_as_evaluation_was() -> None:
    balance = Balance(2, longest=100)
    balance.sent[0] += count_work(prompt(), "train", 3)
    balance.sent[1] += count_work(prompt(), "eval", 4)
    assert balance.least_busy(1) == 0
    balance.update_expected_length("eval", 4, 4 * 50)
    assert balance.least_busy(1) == 1


def test_what_is_expected_follows_what_a_policy_writes() -> None:
    """The mean of the first few samples is used; with many, that of the last ones."""
    balance = Balance(1, longest=100)
    balance.update_expected_length("train", 1, 10)
    balance.update_expected_length("train", 3, 60)
    assert balance.tokens_each.tolist() == [17.5, 100, 1]
    for _ in range(5 * LENGTH_WINDOW // 8):
        balance.update_expected_length("train", 8, 8 * 1000)
    assert balance.tokens_each[0] == pytest.approx(1000, rel=math.exp(-5))


def test_an_episode_that_failed_before_it_read_its_prompt_has_no_length() -> None:
    """Counted, its length would be minus that of the prompt, and the busiest engine might seem idle."""
    asked = prompt(num_tokens=100)
    failed = trajectory(None, prompt=asked, token_ids=[], action_mask=[])
    answered = trajectory(prompt=asked, sample_index=1, actions=range(119))
    assert _num_answered(PromptGroup(prompt=asked, trajectories=[failed, answered])) == (1, 20)


def test_an_engine_has_room_for_what_it_can_work_on() -> None:
    balance = Balance(2, longest=100)
    balance.sent[0] += count_work(prompt(), "train", SAMPLES_IN_FLIGHT)
    balance.sent[1] += count_work(prompt(), "eval", SAMPLES_IN_FLIGHT - 3)
    assert balance.least_busy(3) == 1 and balance.least_busy(4) is None
    balance.merge_report(0, count_work(prompt(), "train", 4))  # a sample of a group that goes on
    assert balance.least_busy(4) == 0
    balance.merge_report(0, count_work(prompt(), "train", SAMPLES_IN_FLIGHT))
    assert balance.least_busy(2 * SAMPLES_IN_FLIGHT) == 0  # a larger group only fits alone


def test_what_a_decision_costs_does_not_grow_with_the_engines() -> None:
    """The cost is counted in calls; each is one product of a matrix of integers, for 512 engines less than 13
    kB."""

    def calls(num_engines: int) -> int:
        balance, count = Balance(num_engines, 100), 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        balance.least_busy(8)
        sys.setprofile(None)
        return count

    assert calls(8) == calls(512) < 100
    assert Balance(512, 100).sent.nbytes == 512 * 3 * np.dtype(np.int64).itemsize < 13_000
