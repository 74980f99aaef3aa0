"""Collection of groups in a world in which the score of a sample depends on its address alone."""

import copy
import itertools
import math
import pickle
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import group_of, plain
from refusals import refused

from openrlhf.config.ppo import AlgoConfig, PPOConfig, RewardConfig, RolloutConfig
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.errors import ErrorCode
from openrlhf.observability.hooks.base import Step
from openrlhf.rollout.dispatch import Dispatcher
from openrlhf.training.collect import SAME_REWARD, Collector, StalenessLimit, check_failures, sample_all
from openrlhf.types import Prompt, PromptGroup, Purpose, Sampled, Trajectory, no_work

Score = float | None
"""Score of a sample; None if it failed."""
Address = tuple[int, int]
"""Epoch and prompt of a group."""


class InOrder(PromptSampler):
    """Hands out the prompts in the order of their numbers."""

    shuffles = False

    def order(self, epoch: int) -> list[int]:
        return list(range(len(self._prompts)))


class World:
    """Rollout that remembers how many prompts were asked for at a time. `scores(epoch, prompt_id)` gives the
    scores of a group, `arrival(n)` which of the n prompts under way is the next to finish."""

    def __init__(
        self,
        scores: Callable[[int, int], Sequence[Score]] = lambda epoch, prompt: (0.0, 1.0),
        *,
        num_prompts: int = 8,
        num_epochs: int | None = 1,
        shuffle: bool = False,
        seed: int = 1,
        arrival: Callable[[int], int] = lambda under_way: 0,
        **flags,
    ) -> None:
        self.scores, self.arrival = scores, arrival
        self.asked: list[list[Address]] = []
        self.under_way: list[Prompt] = []
        self.arrived: list[Address] = []
        dataset = PromptDataset([Prompt(prompt_id=i, text=f"prompt {i}") for i in range(num_prompts)])
        sampler = PromptSampler if shuffle else InOrder
        self.prompts = sampler(dataset, seed=seed, num_epochs=num_epochs)
        self.config = config_of(**flags)
        self.collector = Collector(self.config, self.prompts, self, self.on_group)

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        assert purpose == "train"
        self.asked.append([(p.epoch, p.prompt_id) for p in prompts])
        self.under_way += prompts

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        assert purpose == "train" and timeout == self.config.rollout.timeout
        prompt = self.under_way.pop(self.arrival(len(self.under_way)))
        return group_of(prompt, self.scores(prompt.epoch, prompt.prompt_id))

    def on_group(self, group: PromptGroup) -> None:
        self.arrived.append((group.prompt.epoch, group.prompt.prompt_id))

    def collect(self, number: int) -> Step:
        self.collector.fill(step := Step(number=number, version=0))
        return step

    def run(self, first_step: int = 1) -> list[Step]:
        """Collects every step until nothing is left."""
        steps: list[Step] = []
        while (step := self.collect(first_step + len(steps))).samples:
            steps.append(step)
        assert self.collector.is_exhausted
        return steps


def config_of(
    batch: int = 4,
    at_a_time: int | None = None,
    filters: bool = False,
    score_range: tuple[float, float] = (0.0, 1.0),
    max_batches: int = 10,
    max_failed_ratio: float = 0.5,
) -> PPOConfig:
    return PPOConfig(
        rollout=RolloutConfig(batch_size=batch, vllm_generate_batch_size=at_a_time, n_samples_per_prompt=2),
        algo=AlgoConfig(
            dynamic_filtering_enable=filters,
            dynamic_filtering_range=score_range,
            dynamic_filtering_max_batches=max_batches,
        ),
        reward=RewardConfig(max_failed_ratio=max_failed_ratio),
    )


def test_what_a_call_that_timed_out_has_left_is_passed_over():
    world = World(arrival=lambda under_way: under_way - 1 if under_way > 4 else 0)
    prompts = [Prompt(prompt_id=i, text="?") for i in range(6)]
    world.submit(prompts[:3], "train")  # and nobody has waited for them
    seen: list[PromptGroup] = []
    groups = sample_all(world, prompts[3:], "train", world.config.rollout.timeout, seen.append)
    assert [group.prompt for group in groups] == prompts[3:] and len(seen) == 3


def addresses(trajectories: Sequence[Trajectory]) -> list[Address]:
    """Returns the address of each group once, after checking that its samples are together and in order."""
    found: list[Address] = []
    for t in trajectories:
        address = (t.prompt.epoch, t.prompt.prompt_id)
        if t.sample_index == 0:
            found.append(address)
        assert found[-1] == address
    return found


def prompts_of(step: Step) -> list[int]:
    return [prompt for _, prompt in addresses(step.samples)]


# ---- every prompt


def test_without_further_flags_a_step_asks_for_its_batch_once():
    world = World(num_prompts=10, num_epochs=2)
    steps = world.run()
    assert [len(asked) for asked in world.asked] == [4, 4, 2, 4, 4, 2]
    assert [addresses(step.samples) for step in steps] == world.asked
    assert all(plain(step.collected) == plain(step.samples) for step in steps)
    assert [step.metrics for step in steps[1:3]] == [
        {"rollout/num_prompts": 4.0},
        {"rollout/num_prompts": 2.0},
    ]


@pytest.mark.parametrize(
    ("at_a_time", "asked", "buffered"),
    [
        (2, [2, 2, 2, 2, 2], None),
        (3, [3, 1, 3, 1, 2], None),
        (4, [4, 4, 2], None),
        (6, [6, 4], [2, 2, 0]),
        (9, [9, 1], [5, 1, 0]),
        (64, [10], [6, 2, 0]),
    ],
)
def test_how_many_are_sampled_at_a_time_does_not_change_what_a_step_trains_on(at_a_time, asked, buffered):
    world, usual = World(num_prompts=10, at_a_time=at_a_time), World(num_prompts=10)
    steps = world.run()
    assert [plain(step.samples) for step in steps] == [plain(step.samples) for step in usual.run()]
    assert [len(prompts) for prompts in world.asked] == asked
    assert [step.metrics.get("rollout/buffered_groups") for step in steps] == (buffered or [None] * 3)


def test_a_step_that_the_buffer_fills_samples_nothing():
    world = World(num_prompts=8, at_a_time=8)
    first, second = world.run()
    assert len(first.collected) == 16 and second.collected == []
    assert second.metrics == {"rollout/num_prompts": 0.0, "rollout/buffered_groups": 0.0}


def test_failed_samples_stay_in_their_batch_without_filtering():
    world = World(lambda epoch, prompt: (None, None), num_prompts=4)
    (step,) = world.run()
    assert [t.ok for t in step.samples] == [False] * 8


# ---- filtered


def solved(*prompts: int) -> Callable[[int, int], Sequence[Score]]:
    """Scores these prompts as solved once in two times; of the others even ones are never solved and odd ones
    always."""
    return lambda epoch, prompt: (0.0, 1.0) if prompt in prompts else (float(prompt % 2),) * 2


def test_rejected_groups_are_replaced():
    """Prompts 0 1 2 3 leave 1 2, and 4 5 leave 4; 6 leaves none, 7 itself: four of eight are kept."""
    world = World(solved(1, 2, 4, 7), num_prompts=9, filters=True)
    step = world.collect(1)
    assert prompts_of(step) == [1, 2, 4, 7]
    assert [len(asked) for asked in world.asked] == [4, 2, 1, 1]
    assert addresses(step.collected) == [(0, i) for i in range(8)]
    assert step.metrics == {
        "rollout/num_prompts": 8.0,
        "rollout/buffered_groups": 0.0,
        "rollout/kept_ratio": 4 / 8,
        "rollout/filtered_low_ratio": 2 / 8,  # prompts 0 and 6
        "rollout/filtered_high_ratio": 2 / 8,  # prompts 3 and 5
        "rollout/filtered_failed_ratio": 0.0,
        "rollout/sampled_score_mean": 0.5,
    }


def test_accepted_groups_above_the_batch_come_first_in_the_next_step():
    world = World(solved(0, 1, 2, 4, 5, 7, 8), num_prompts=9, at_a_time=3, batch=2, filters=True)
    steps = world.run()
    assert [prompts_of(step) for step in steps] == [[0, 1], [2, 4], [5, 7], [8]]
    assert [len(asked) for asked in world.asked] == [3, 3, 3]
    assert [step.metrics["rollout/buffered_groups"] for step in steps] == [1, 1, 1, 0]
    assert [step.metrics["rollout/num_prompts"] for step in steps] == [3, 3, 3, 0]
    assert "rollout/kept_ratio" not in steps[3].metrics


def test_a_batch_goes_on_in_the_next_episode():
    world = World(solved(1, 2, 3), num_prompts=4, num_epochs=2, filters=True)
    first, second = world.run()
    assert addresses(first.samples) == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert addresses(second.samples) == [(1, 2), (1, 3)]


def test_what_was_accepted_when_the_prompts_ran_out_is_the_last_batch():
    world = World(solved(3), num_prompts=6, filters=True)
    assert [prompts_of(step) for step in world.run()] == [[3]]


def test_nothing_is_left_when_the_last_prompts_are_rejected():
    world = World(solved(0, 1), num_prompts=4, batch=2, filters=True)
    assert prompts_of(world.collect(1)) == [0, 1]
    assert not world.collector.is_exhausted
    last = world.collect(2)
    assert last.samples == [] and len(last.collected) == 4
    assert last.metrics["rollout/kept_ratio"] == 0
    assert world.collector.is_exhausted


@pytest.mark.parametrize(
    ("scores", "is_kept"),
    [
        ((0.0, 0.0), False),
        ((0.2, 0.2), False),  # at the bound
        ((0.2, 0.3), True),
        ((0.6, 0.8), False),  # their mean is the bound
        ((0.6, 0.7), True),
        ((0.0, 1.0), True),  # the mean counts, not its parts
        ((0.3, None), True),  # the mean of the samples that finished
        ((0.1, None), False),
        ((None, None), False),
    ],
)
def test_a_group_is_kept_if_the_mean_of_its_finished_samples_is_inside(scores, is_kept):
    world = World(
        lambda epoch, prompt: scores if prompt else (0.5, 0.5),
        num_prompts=2,
        batch=2,
        filters=True,
        score_range=(0.2, 0.7),
        max_failed_ratio=1.0,
    )
    assert prompts_of(world.collect(1)) == [0, 1][: 1 + is_kept]


def test_a_sample_of_several_sequences_has_one_score():
    """The agent of the second sample rewrote its history three times."""
    world = World(num_prompts=1, batch=1, filters=True, score_range=(0.4, 0.6))
    group = group_of(Prompt(prompt_id=0, text=""), (0.0, 1.0))
    first, second = group.trajectories
    parts = [replace(second, part=part) for part in range(4)]
    assert world.collector._filter(replace(group, trajectories=[first, *parts])) == "kept"


def test_equal_scores_at_a_bound_are_not_inside_by_rounding():
    assert (0.1 + 0.1 + 0.1) / 3 > 0.1
    world = World(lambda epoch, prompt: (0.1,) * 3, batch=1, filters=True, score_range=(0.1, 0.9))
    with pytest.raises(RuntimeError, match="kept 0 of 8"):
        world.collect(1)


# ---- bounds


def test_a_step_that_asks_for_too_many_prompts_stops_the_run():
    """One prompt of 0 to 5 is kept; 0 and 4 are never solved, 1 and 3 always, 5 gives no score."""
    scores = solved(2)
    world = World(
        lambda epoch, prompt: (None, None) if prompt == 5 else scores(epoch, prompt),
        num_prompts=9,
        num_epochs=None,
        batch=2,
        at_a_time=4,
        max_batches=3,
        filters=True,
    )
    with refused(ErrorCode.EPISODES_FAILED) as error:
        world.collect(7)
    assert [len(asked) for asked in world.asked] == [4, 2]
    first, *remedies = error.value.text.splitlines()
    assert re.findall(r"[\d]+", first) == ["7", "1", "6", "2", "0", "2", "1", "2", "1"]
    assert len(remedies) == 2
    assert "--algo.dynamic_filtering_range" in remedies[0]
    assert "--algo.dynamic_filtering_max_batches 3" in remedies[1]


def test_prompts_that_end_with_the_bound_are_no_error():
    world = World(solved(1), num_prompts=4, batch=2, max_batches=2, filters=True)
    assert [prompts_of(step) for step in world.run()] == [[1]]


def test_a_buffer_does_not_count_towards_the_bound():
    world = World(solved(0, 1, 3, 5, 7), num_prompts=8, batch=2, at_a_time=2, max_batches=2, filters=True)
    assert [prompts_of(step) for step in world.run()] == [[0, 1], [3, 5], [7]]


def test_a_first_step_without_anything_is_an_error():
    world = World(lambda epoch, prompt: (0.0, 0.0), num_prompts=3, filters=True)
    with refused(ErrorCode.EPISODES_FAILED) as error:
        world.collect(1)
    assert re.search(r"^step 1: .* 0 of 3 groups, .* 0 or less: 3; of 1 or more: 0;", error.value.text)
    assert SAME_REWARD in error.value.text


@pytest.mark.parametrize("at_a_time", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("num_prompts", [2, 1000])
def test_rewards_that_always_fail_stop_a_filtered_run_after_one_batch(at_a_time, num_prompts):
    world = World(
        lambda epoch, prompt: (None, None), num_prompts=num_prompts, at_a_time=at_a_time, filters=True
    )
    with refused(ErrorCode.REWARDS_FAILED, flag="--reward.max_failed_ratio") as error:
        world.collect(3)
    assert re.search(r"^step 3: (\d+) of \1 samples .* \1 of them .*\nno opinion$", error.value.text)
    portion = at_a_time or 4
    assert sum(map(len, world.asked)) == min(num_prompts, -(-4 // portion) * portion)


def test_one_prompt_that_fails_does_not_stop_a_filtered_run():
    """The failed prompt is all of the first portion."""
    world = World(
        lambda epoch, prompt: (0.0, 1.0) if prompt else (None, None), num_prompts=5, at_a_time=1, filters=True
    )
    (step,) = world.run()
    assert prompts_of(step) == [1, 2, 3, 4]
    assert step.metrics["rollout/filtered_failed_ratio"] == 1 / 5
    assert step.metrics["rollout/sampled_score_mean"] == 0.5


def test_failures_up_to_the_ratio_are_dropped():
    prompt = Prompt(prompt_id=0, text="")
    mixed = group_of(prompt, [0.5, None, 0.5]).trajectories
    check_failures(mixed, 1 / 3, 5)
    none_left = "1 of 1 samples failed, so none is left to train on."
    for samples, ratio, counts in ((mixed, 0.3, "1 of 3 samples failed."), (mixed[1:2], 1.0, none_left)):
        limit = {"flag": "--reward.max_failed_ratio", "value": f"{ratio:g}"}
        with refused(ErrorCode.REWARDS_FAILED, **limit) as error:
            check_failures(samples, ratio, 5)
        assert error.value.text.startswith(f"step 5: {counts} ")


# ---- order


def test_engines_that_finish_in_another_order_change_nothing():
    class Engine:
        """Engine that finishes prompts in reverse: the later one is asked for, the sooner its samples are
        there."""

        def run_group(
            self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
        ) -> Future[Sampled]:
            future: Future[Sampled] = Future()
            group = group_of(prompt, world.scores(prompt.epoch, prompt.prompt_id))
            sampled = Sampled(group=group, done=no_work())
            Timer(0.02 * (8 - prompt.prompt_id), future.set_result, [sampled]).start()
            return future

    world, other = (World(solved(1, 2, 4, 6, 7), at_a_time=8, batch=2, filters=True) for _ in range(2))
    memory = SimpleNamespace(wake=lambda: None, rest=lambda: None)
    engines = Dispatcher([Engine(), Engine()], {"train": 2}, memory=memory, longest=8)
    world.collector = Collector(world.config, world.prompts, engines, world.on_group)
    assert plain(world.run()) == plain(other.run())
    assert world.arrived != sorted(world.arrived)
    engines.close()


@pytest.mark.parametrize(
    ("options", "asked", "steps"),
    [
        (
            {},
            [4, 4, 2],
            [[(0, 9), (0, 5), (0, 2), (0, 7)], [(0, 0), (0, 8), (0, 3), (0, 1)], [(0, 6), (0, 4)]],
        ),
        (
            {"at_a_time": 6},
            [6, 4],
            [[(0, 9), (0, 5), (0, 2), (0, 7)], [(0, 0), (0, 8), (0, 3), (0, 1)], [(0, 6), (0, 4)]],
        ),
        (
            {"filters": True},
            [4, 3, 1, 1, 1, 3, 2, 1, 4],
            [[(0, 2), (0, 0), (0, 8), (0, 6)], [(0, 4), (1, 9), (1, 1), (1, 3)], [(1, 7), (1, 5)]],
        ),
        (
            {"filters": True, "at_a_time": 6},
            [6, 4, 6, 4],
            [[(0, 2), (0, 0), (0, 8), (0, 6)], [(0, 4), (1, 9), (1, 1), (1, 3)], [(1, 7), (1, 5)]],
        ),
    ],
)
def test_what_three_steps_train_on_and_ask_for(options, asked, steps):
    """The figures must not move: a run that was begun with another version goes on with the same prompts,
    whose addresses are those of their seeds. Even numbers are solved sometimes in the first epoch, odd ones
    in the second; the others never or always."""
    by_kind = ((0.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    world = World(
        lambda epoch, prompt: by_kind[(epoch + prompt) % 4],
        num_prompts=10,
        num_epochs=2,
        shuffle=True,
        seed=42,
        arrival=random.Random(0).randrange,
        **options,
    )
    found = [addresses(world.collect(step).samples) for step in (1, 2, 3)]
    assert found == steps
    assert [len(prompts) for prompts in world.asked] == asked
    assert world.arrived != [address for prompts in world.asked for address in prompts]


# ---- any world


@st.composite
def worlds(draw) -> Callable[..., World]:
    """Draws a function that makes the same world again, with other options."""
    num_prompts, num_epochs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    n = draw(st.integers(1, 3))
    score = st.sampled_from((0.0, 1.0, 1.0, 0.5, None))
    group = st.lists(score, min_size=n, max_size=n)
    scores = draw(st.lists(group, min_size=36, max_size=36))
    options: dict[str, Any] = {
        "num_prompts": num_prompts,
        "num_epochs": num_epochs,
        "shuffle": draw(st.booleans()),
        "batch": draw(st.integers(1, 6)),
        "at_a_time": draw(st.none() | st.integers(1, 14)),
        "filters": draw(st.booleans()),
        "max_batches": 36,
        "max_failed_ratio": 1.0,
    }
    return lambda **more: World(lambda epoch, i: scores[12 * epoch + i], **(options | more))


def every_prompt(prompts: PromptSampler) -> list[Prompt]:
    return [prompt for batch in iter(lambda: prompts.next_batch(5), []) for prompt in batch]


def is_inside(scores: Sequence[Score]) -> bool:
    finished = [score for score in scores if score is not None]
    return bool(finished) and 0 < sum(finished) / len(finished) < 1


def run_or_error(world: World) -> list[Step] | str:
    try:
        return world.run()
    except RuntimeError as error:
        return str(error)


@settings(max_examples=100)
@given(worlds())
def test_no_accepted_group_is_lost_or_used_twice(world_of):
    world = world_of()
    steps = run_or_error(world)
    everything = [(p.epoch, p.prompt_id) for p in every_prompt(world_of().prompts)]
    asked = [address for prompts in world.asked for address in prompts]
    assert asked == everything[: len(asked)]
    if isinstance(steps, str):  # the first step has nothing at all, or nothing but failures
        assert world.config.algo.dynamic_filtering_enable
        assert "max_failed_ratio" in steps or not any(is_inside(world.scores(*a)) for a in asked)
        return
    filters, size = world.config.algo.dynamic_filtering_enable, world.config.rollout.batch_size
    accepted = [a for a in everything if not filters or is_inside(world.scores(*a))]
    batches = [addresses(step.samples) for step in steps]
    assert [a for batch in batches for a in batch] == accepted
    if filters:
        assert all(len(batch) == size for batch in batches[:-1]) and 0 < len(batches[-1]) <= size
    else:
        assert all(len({epoch for epoch, _ in batch}) == 1 for batch in batches)
        num_epochs = everything[-1][0] + 1
        assert len(batches) == num_epochs * math.ceil(len(everything) // num_epochs / size)
    sampled = [a for step in steps for a in addresses(step.collected)]
    assert sampled == everything[: len(sampled)]
    assert all(step.metrics["rollout/num_prompts"] == len(addresses(step.collected)) for step in steps)


@settings(max_examples=50)
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(world_of, rng: random.Random):
    one, other = (run_or_error(world_of(**options)) for options in ({"arrival": rng.randrange}, {}))
    assert plain(one) == plain(other)


@settings(max_examples=30)
@given(worlds())
def test_a_run_that_is_resumed_at_any_step_goes_on_with_the_same_batches(world_of):
    whole = run_or_error(world_of())
    if isinstance(whole, str):
        return
    interrupted, expected = world_of(), plain(whole)
    for done in range(len(whole) + 1):
        resumed = world_of()
        resumed.collector.load_state_dict(pickle.loads(pickle.dumps(interrupted.collector.state_dict())))
        assert plain(resumed.run(first_step=done + 1)) == expected[done:]
        if done < len(whole):
            assert plain(interrupted.collect(done + 1)) == expected[done]


@settings(max_examples=60)
@given(worlds(), st.integers(1, 4))
def test_a_step_never_asks_for_more_than_the_bound(world_of, max_batches):
    world = world_of(max_batches=max_batches, filters=True)
    rollout = world.config.rollout
    bound = max(max_batches * rollout.batch_size, rollout.vllm_generate_batch_size or 0)
    for step in range(1, 40):
        before = len(world.asked)
        try:
            trajectories = world.collect(step).samples
        except RuntimeError:
            trajectories = []
        assert sum(map(len, world.asked[before:])) <= bound
        if not trajectories:
            return
    raise AssertionError("36 groups give at most 36 batches")


# ---- sampled ahead


@pytest.mark.parametrize(
    ("options", "kept", "under_way", "asked", "room"),
    [
        ({}, 0, 0, 0, 4),
        ({}, 3, 0, 8, 1),
        ({}, 4, 0, 0, 0),
        ({}, 0, 1, 1, 0),  # no more is asked for until that has arrived
        ({"chunk": 3}, 0, 0, 0, 3),
        ({"chunk": 3}, 3, 0, 3, 1),
        ({"chunk": 6}, 0, 0, 0, 4),
        ({"chunk": 6, "may_exceed": True}, 0, 0, 0, 6),
        ({"chunk": 6, "may_exceed": True}, 3, 0, 6, 6),
        ({"chunk": 6, "may_exceed": True}, 4, 0, 6, 0),
        ({"limit": 6, "may_exceed": True}, 1, 0, 4, 2),
        ({"limit": 6, "may_exceed": True}, 1, 0, 6, 0),
        ({"limit": 8, "chunk": 3, "may_exceed": True}, 3, 0, 6, 2),
        ({"max_staleness": 1}, 0, 0, 0, 8),
        ({"max_staleness": 1}, 1, 4, 4, 3),
        ({"max_staleness": 1}, 4, 4, 4, 0),
        ({"max_staleness": 2}, 4, 4, 0, 4),
        ({"max_staleness": 1, "chunk": 3}, 1, 2, 3, 3),
        ({"max_staleness": 1, "chunk": 3}, 3, 3, 6, 2),
        ({"max_staleness": 1, "chunk": 3, "may_exceed": True}, 3, 3, 6, 3),
    ],
)
def test_room_for_prompts(options, kept, under_way, asked, room):
    """A step has four groups."""
    staleness_limit = StalenessLimit(batch_size=4, **options)
    assert staleness_limit.room(kept=kept, under_way=under_way, asked=asked) == room


@pytest.mark.parametrize(
    ("filters", "chunk", "limit", "may_exceed"),
    [(False, None, None, False), (False, 9, None, True), (True, None, 12, True), (True, 20, 20, True)],
)
def test_prompts_of_a_step_are_limited_where_groups_are_filtered(filters, chunk, limit, may_exceed):
    config = World(num_prompts=4).config
    algo = replace(config.algo, dynamic_filtering_enable=filters, dynamic_filtering_max_batches=3)
    rollout = replace(config.rollout, batch_size=4, vllm_generate_batch_size=chunk)
    staleness_limit = StalenessLimit.from_config(replace(config, algo=algo, rollout=rollout))
    assert (staleness_limit.limit, staleness_limit.may_exceed) == (limit, may_exceed)
    assert (staleness_limit.batch_size, staleness_limit.chunk) == (4, chunk)


def ahead(world: World, **changes) -> World:
    world.collector.staleness_limit = replace(world.collector.staleness_limit, **changes)
    return world


def test_groups_are_sampled_ahead_and_handed_out_as_they_were_asked_for():
    """Groups of the prompts 0 1 2 3 arrive in the order 1 3 0, and of 2 4 5 the group 5 is the first."""
    places = iter((1, 2, 0, 2, 0))
    options = {"num_prompts": 6, "batch": 2, "arrival": lambda n: next(places)}
    world = ahead(World(**options), max_staleness=1)
    assert [prompts_of(world.collect(step)) for step in (1, 2)] == [[0, 1], [2, 3]]
    assert [len(asked) for asked in world.asked] == [4, 2]
    assert not world.collector.is_exhausted  # 4 is under way, and 5 waits for it


@settings(max_examples=60)
@given(worlds(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_more_is_sampled_ahead_than_the_bound(world_of, max_staleness, rng: random.Random):
    """A portion may go beyond the bound where portions may exceed what is missing. Everything is trained on
    once, and no later than the bound after it was asked for."""
    world = ahead(world_of(arrival=rng.randrange, filters=False), max_staleness=max_staleness)
    rollout = world.config.rollout
    bound, portion = rollout.batch_size * (1 + max_staleness), rollout.vllm_generate_batch_size or 0
    if portion > rollout.batch_size:
        bound += portion - 1
    trained: list[Address] = []
    asked_in: dict[Address, int] = {}
    for number in itertools.count():
        if not (step := addresses(world.collect(number + 1).samples)):
            break
        new = list(itertools.chain(*world.asked))[len(asked_in) :]
        asked_in |= dict.fromkeys(new, number)
        assert len(asked_in) - len(trained) <= bound
        assert len({epoch for epoch, _ in step}) == 1
        if portion <= rollout.batch_size:
            assert all(number - asked_in[address] <= max_staleness for address in step)
        trained += step
    everything = [(p.epoch, p.prompt_id) for p in every_prompt(world_of().prompts)]
    assert trained == everything
    assert world.collector.is_exhausted


# ---- checkpoints


def test_the_buffer_goes_through_a_checkpoint_file(tmp_path):
    world, other = (World(num_prompts=6, at_a_time=6) for _ in range(2))
    world.collect(1)
    torch.save({"openrlhf": world.collector.state_dict()}, tmp_path / "state.pt")
    other.collector.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False)["openrlhf"])
    assert not other.collector.is_exhausted
    assert plain(other.collect(2)) == plain(world.collect(2))
    assert other.asked == [] and other.collector.is_exhausted


def test_a_saved_state_does_not_change_with_the_run():
    world = World(num_prompts=6, at_a_time=6)
    world.collect(1)
    state = world.collector.state_dict()
    world.run(first_step=2)
    assert len(state["groups"]) == 2


def test_the_state_of_other_prompts_is_refused():
    state = World(num_prompts=6).collector.state_dict()
    with refused(ErrorCode.OTHER_RUN) as told:
        World(num_prompts=8).collector.load_state_dict(state)
    assert re.search(r"\bnum_prompts\b.*\b6\b.*\b8\b", told.value.text)


def test_groups_in_a_form_of_another_version_are_refused():
    state = World(num_prompts=8).collector.state_dict() | {"buffer": [["one"], ["two"]]}
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.load_enable", told="2 groups of samples"):
        World(num_prompts=8).collector.load_state_dict(state)


def test_a_state_of_another_version_without_groups_is_loaded():
    world, other = World(num_prompts=8), World(num_prompts=8)
    world.collect(1)
    prompts = world.collector.state_dict()["prompts"]
    other.collector.load_state_dict({"prompts": prompts, "buffer": []})
    assert other.collector.state_dict() == {"prompts": prompts, "groups": [], "under_way": [], "finished": []}


def test_what_is_being_sampled_is_asked_for_anew_by_a_resumed_run():
    """Groups that had finished before their turn are asked for again too: nothing is lost, and nothing that
    was there is sampled twice."""
    places = iter((3, 0, 0))
    arrivals = lambda n: next(places), lambda n: n - 1
    worlds = [World(num_prompts=10, batch=2, arrival=arrival) for arrival in arrivals]
    world, other = (ahead(world, max_staleness=2) for world in worlds)
    trained = addresses(world.collect(1).samples)
    state = copy.deepcopy(world.collector.state_dict())
    assert state["under_way"] and state["finished"]
    other.collector.load_state_dict(state)
    assert not other.collector.is_exhausted
    first = addresses(other.collect(2).samples)
    there = [(g.prompt.epoch, g.prompt.prompt_id) for g in [*state["groups"], *state["finished"]]]
    again = [(p.epoch, p.prompt_id) for p in state["under_way"]]
    assert other.asked[0] == [address for address in again if address not in there]
    trained += first + [a for step in other.run(first_step=3) for a in addresses(step.samples)]
    assert trained == [(0, i) for i in range(10)]
