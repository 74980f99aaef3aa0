"""Quotas of tasks and curricula, in the world of test_collect.py."""

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from records import plain
from refusals import refused
from test_collect import World, addresses, ahead

from openrlhf.algorithms.curricula import Curriculum
from openrlhf.algorithms.curricula.difficulty import Difficulty
from openrlhf.data.order import epoch_order
from openrlhf.data.prompt_sampler import PromptDataset, PromptDraws, Shuffled
from openrlhf.errors import ErrorCode, RunError
from openrlhf.observability.hooks.base import Step
from openrlhf.training.collect import Collector
from openrlhf.types import Prompt


class TaskWorld(World):
    """A world whose prompts have sources: `sizes` prompts of each."""

    def __init__(
        self,
        sizes: dict[str, int],
        quotas: dict[str, int],
        *,
        build: Callable[[], Curriculum] = Shuffled,
        max_staleness: int = 0,
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(batch=sum(quotas.values()) or 4, **options)
        names = [name for name, size in sizes.items() for _ in range(size)]
        self.dataset = PromptDataset(
            [Prompt(prompt_id=i, text=f"prompt {i}", source=name) for i, name in enumerate(names)]
        )
        size = self.config.rollout.batch_size
        self.prompts = PromptDraws(self.dataset, seed=seed, batch_size=size, quotas=quotas, build=build)
        self.collector = Collector(self.config, self.prompts, self, self.on_group)
        if max_staleness:
            ahead(self, max_staleness=max_staleness)

    def sources(self, step: Step) -> Counter[str]:
        found = [self.dataset.without_images[i].source for _, i in addresses(step.samples)]
        return Counter(found)


SIZES, QUOTAS = {"chat": 3, "math": 20}, {"math": 6, "chat": 2}


def test_a_step_has_the_quotas_and_a_task_starts_again_when_its_prompts_are_used_up():
    """The task furthest from its quota comes next, in doubt the first one. Three prompts of chat are drawn in
    the orders of their own epochs, and the epoch of an address counts the earlier draws of its prompt."""
    world = TaskWorld(SIZES, QUOTAS)
    steps = [world.collect(number) for number in (1, 2, 3)]
    assert [world.sources(step) for step in steps] == [Counter(QUOTAS)] * 3
    names = [world.dataset.without_images[i].source for _, i in world.asked[0]]
    assert names == ["math", "chat", "math", "math", "math", "chat", "math", "math"]
    chat = [(epoch, i) for step in steps for epoch, i in addresses(step.samples) if i < 3]
    assert chat == [(e, i) for e in (0, 1) for i in epoch_order(3, seed=1, epoch=e)]
    math = [i - 3 for step in steps for _, i in addresses(step.samples) if i >= 3]
    assert math == epoch_order(20, seed=1, epoch=0)[:18]
    assert not world.collector.is_exhausted


@pytest.mark.parametrize("at_a_time", [1, 3, 5, 8, 11, 20])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_how_many_are_sampled_at_a_time_does_not_change_what_a_step_trains_on(at_a_time, max_staleness):
    plain_world = TaskWorld(SIZES, QUOTAS)
    other = TaskWorld(SIZES, QUOTAS, at_a_time=at_a_time, max_staleness=max_staleness)
    for number in range(1, 7):
        expected, found = (addresses(w.collect(number).samples) for w in (plain_world, other))
        assert found == expected


def test_filtered_groups_are_replaced_by_groups_of_their_task():
    """Every second prompt of math is rejected, and none of chat: no more of chat is asked for than a step
    needs."""
    scores = lambda epoch, i: (0.0, 0.0) if i >= 3 and i % 2 else (0.0, 1.0)
    world = TaskWorld(SIZES, QUOTAS, scores=scores, filters=True)
    for number in range(1, 5):
        step = world.collect(number)
        assert world.sources(step) == QUOTAS
        asked = Counter(world.dataset.without_images[i].source for _, i in itertools.chain(*world.asked))
        assert asked["chat"] == 2 * number and asked["math"] > 6 * number


@st.composite
def task_worlds(draw) -> Callable[..., TaskWorld]:
    sizes = {name: draw(st.integers(1, 6)) for name in ("a", "b", "c")}
    scores = draw(st.lists(st.sampled_from([(0.0, 1.0), (0.0, 0.0), (None, None)]), min_size=7, max_size=7))
    filters, max_staleness = draw(st.booleans()), draw(st.integers(0, 2))
    learns = draw(st.booleans()) and not (filters and max_staleness)
    options: dict[str, Any] = {
        "scores": lambda epoch, i: (0.0, 1.0) if i in (0, 6, 12) else scores[(epoch + i) % 7],
        "filters": filters,
        "max_staleness": max_staleness,
        "at_a_time": draw(st.none() | st.integers(1, 14)),
        "build": Difficulty if learns else Shuffled,
        "max_batches": 1000,
        "max_failed_ratio": 1.0,
    }
    # of each task, the first prompt is accepted, so that a step can always be filled
    sizes = dict.fromkeys(sizes, 6) if filters else sizes
    quotas = {name: draw(st.integers(1, 4)) for name in sizes}
    return lambda **more: TaskWorld(sizes, quotas, **(options | more))


def collected(world: TaskWorld, number: int) -> Step:
    """Collects a step; one whose samples all failed, which ends a run, is no example."""
    try:
        return world.collect(number)
    except RunError:
        reject()


@settings(max_examples=30, deadline=None)
@given(task_worlds(), st.randoms(use_true_random=False))
def test_each_step_has_its_quotas_whatever_arrives_first(world_of, rng: random.Random):
    """With filters, samples ahead and a curriculum. No group is trained on twice."""
    one, other, trained = world_of(), world_of(arrival=rng.randrange), []
    for number in range(1, 6):
        step = collected(one, number)
        assert one.sources(step) == one.prompts.quotas
        assert plain(step.samples) == plain(other.collect(number).samples)
        trained += addresses(step.samples)
    assert len(trained) == len({*trained})


@settings(max_examples=20, deadline=None)
@given(task_worlds())
def test_a_resumed_run_goes_on_with_the_same_batches(world_of):
    whole = world_of()
    expected = [plain(collected(whole, number).samples) for number in range(1, 6)]
    interrupted = world_of()
    for done in range(5):
        resumed = world_of()
        resumed.collector.load_state_dict(pickle.loads(pickle.dumps(interrupted.collector.state_dict())))
        found = [plain(resumed.collect(number).samples) for number in range(done + 1, 6)]
        assert found == expected[done:]
        interrupted.collect(done + 1)


def test_no_group_is_older_than_the_bound_where_a_task_is_filtered():
    scores = lambda epoch, i: (0.0, 0.0) if i >= 3 and (epoch + i) % 4 else (0.0, 1.0)
    world = TaskWorld(SIZES, QUOTAS, scores=scores, filters=True, max_staleness=1, max_batches=99)
    asked_in: dict = {}
    for number in range(1, 8):
        step = addresses(world.collect(number).samples)
        asked_in |= {a: number for a in itertools.chain(*world.asked) if a not in asked_in}
        assert all(number - asked_in[address] <= 1 for address in step)


def test_a_curriculum_learns_of_each_group_once_also_of_filtered_ones():
    told: list[tuple[int, list[float]]] = []

    class Told(Shuffled):
        def observe(self, index: int, scores: Sequence[float]) -> None:
            told.append((index, [*scores]))

    scores = {0: (0.0, 0.0), 1: (None, 1.0), 2: (None, None)}
    world = TaskWorld(
        {"a": 8}, {}, build=Told, filters=True, scores=lambda epoch, i: scores.get(i, (0.0, 1.0))
    )
    world.collect(1)
    asked = [i for _, i in itertools.chain(*world.asked)]
    assert len(asked) > 4  # some were filtered
    finished = {i: [s for s in scores.get(i, (0.0, 1.0)) if s is not None] for i in range(8)}
    assert sorted(told) == sorted((i, finished[i]) for i in asked)


def test_the_state_of_other_prompts_is_refused():
    state = TaskWorld(SIZES, QUOTAS).collector.state_dict()
    with refused(ErrorCode.OTHER_RUN):
        TaskWorld({"chat": 4, "math": 20}, QUOTAS).collector.load_state_dict(state)
