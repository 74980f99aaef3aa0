from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import batch_of, group_of, trajectory

from openrlhf.config.ppo import AlgoConfig, CriticConfig, PPOConfig, RolloutConfig, TrainConfig
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.observability.hooks.base import Step
from openrlhf.training.collect import Collector
from openrlhf.training.schedule import (
    build_schedule,
    mean_metrics,
    num_batches,
    num_updates,
    prompts_of_steps,
    training_schedule,
)
from openrlhf.types import Prompt, PromptGroup, Purpose

LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=40)


def schedule_of(lengths: Sequence[int], **options: Any) -> list[list[list[int]]]:
    """Schedules all samples."""
    return training_schedule(lengths, range(len(lengths)), **options)


@given(LENGTHS, st.integers(1, 10), st.integers(1, 3), st.integers(1, 4))
def test_each_epoch_visits_each_sample_once(lengths, num_batches, epochs, num_ranks):
    steps = training_schedule(
        lengths, range(len(lengths)), num_batches=num_batches, epochs=epochs, num_ranks=num_ranks, seed=(1,)
    )
    assert all(len(ranks) == num_ranks for ranks in steps)
    num_batches = min(num_batches, len(lengths))
    assert num_batches * epochs == len(steps)
    for epoch in range(epochs):
        batches = [
            [i for rank in ranks for i in rank]
            for ranks in steps[epoch * num_batches : (epoch + 1) * num_batches]
        ]
        assert Counter(i for batch in batches for i in batch) == Counter(range(len(lengths)))
        sizes = [len(batch) for batch in batches]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_sampled", "batch_size", "expected"), [(32, 16, 2), (8, 16, 1), (1, 16, 1), (33, 16, 2)]
)
def test_number_of_steps(num_sampled, batch_size, expected):
    assert num_batches(num_sampled, batch_size) == expected


@pytest.mark.parametrize(("forced", "updates", "of_run"), [(False, 4, 10), (True, 1, 3)])
def test_a_step_on_policy_is_one_optimizer_step(forced, updates, of_run):
    """20 prompts x 2 samples in steps of 8, 8 and 4 prompts; a batch has 4 samples, or all of a step."""
    config = PPOConfig(
        rollout=RolloutConfig(batch_size=8, n_samples_per_prompt=2),
        train=TrainConfig(batch_size=4, force_on_policy=forced),
    )
    assert config.updates_per_step == updates
    assert num_updates(config, 20) == of_run
    model = SimpleNamespace(data_parallel_size=2, num_updates=0)
    for size in (16, 48):  # a loop of one's own has batches of any size
        batch = batch_of([trajectory(0.0, [2, 3])] * size)
        schedule = build_schedule(config, model, batch, range(size), size, routed=False)
        steps = 1 if forced else size // 4
        assert [sum(map(len, ranks)) for ranks in schedule] == [size // steps] * steps


def test_failed_samples_make_batches_smaller_not_fewer():
    steps = schedule_of([5] * 3, num_batches=2, epochs=1, num_ranks=2, seed=(0,))
    assert sorted(sum(map(len, ranks)) for ranks in steps) == [1, 2]


def test_the_order_is_that_of_the_seed():
    def order(seed):
        return schedule_of([3] * 20, num_batches=4, epochs=2, num_ranks=1, seed=seed)

    assert order((42, 0)) == order((42, 0))
    assert order((42, 0)) != order((42, 1)) != order((43, 1))
    assert order((42, 0))[:4] != order((42, 0))[4:]  # epochs differ


def test_batches_do_not_depend_on_the_number_of_ranks():
    """A run on more ranks therefore takes the same optimizer steps."""
    lengths = [(7 * i) % 23 + 2 for i in range(24)]

    def batches(num_ranks):
        steps = training_schedule(
            lengths, range(len(lengths)), num_batches=3, epochs=2, num_ranks=num_ranks, seed=(1, 2)
        )
        return [sorted(i for rank in ranks for i in rank) for ranks in steps]

    assert batches(1) == batches(2) == batches(5)


def test_ranks_get_about_the_same_number_of_tokens():
    (ranks,) = training_schedule(
        [100, 1, 1, 98, 50, 50], range(6), num_batches=1, epochs=1, num_ranks=2, seed=(0,)
    )
    tokens = [sum([100, 1, 1, 98, 50, 50][i] for i in rank) for rank in ranks]
    assert sorted(tokens) == [150, 150]


def test_mean_metrics_of_steps_of_which_one_was_skipped():
    steps = [{"loss": 1.0, "skipped": 0.0}, {"skipped": 1.0}, {"loss": 4.0, "skipped": 0.0}]
    assert mean_metrics(steps) == {"loss": 2.5, "skipped": 1 / 3}


def test_mean_metrics_of_batches_of_24_and_72_samples():
    """A mean of one value is this value: 24 * 0.1 / 24 would not be."""
    batches = [{"reward": 1.0, "kl": 0.1}, {"reward": 3.0}]
    assert mean_metrics(batches, [24, 72]) == {"reward": 2.5, "kl": 0.1}


def test_mean_metrics():
    assert mean_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}


@st.composite
def runs(draw) -> tuple[PPOConfig, int]:
    """Draws the flags of a run, and the number of its prompts."""
    prompts, samples = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    divisors = [n for n in range(1, prompts * samples + 1) if prompts * samples % n == 0]
    config = PPOConfig(
        rollout=RolloutConfig(batch_size=prompts, n_samples_per_prompt=samples),
        train=TrainConfig(
            batch_size=draw(st.sampled_from(divisors)),
            max_epochs=draw(st.integers(1, 3)),
            num_episodes=draw(st.integers(1, 4)),
            max_steps=draw(st.none() | st.integers(1, 9)),
        ),
        critic=CriticConfig(freezing_steps=draw(st.integers(-1, 4))),
        algo=AlgoConfig(dynamic_filtering_enable=draw(st.booleans())),
    )
    return config, draw(st.integers(1, 40))


class Solved:
    """Rollout in which nothing is filtered out."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.under_way: list[Prompt] = []

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.under_way += prompts

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        return group_of(self.under_way.pop(), [0.5] * self.num_samples)


def updates_of(config: PPOConfig, num_prompts: int) -> list[int]:
    """Returns the optimizer steps of each RL step, counted while the batches of a run are dealt. Nothing is
    filtered out."""
    samples = config.rollout.n_samples_per_prompt

    dataset = PromptDataset([Prompt(prompt_id=i, text="") for i in range(num_prompts)])
    sampler = PromptSampler(dataset, seed=0, num_epochs=config.train.num_episodes)
    collector, made = Collector(config, sampler, Solved(samples), lambda group: None), []
    while len(made) != config.train.max_steps:
        collector.fill(step := Step(number=len(made) + 1, version=0))
        if not step.samples:
            break
        count = num_batches(len(step.samples), config.train.batch_size)
        epochs, lengths = config.train.max_epochs, [2] * len(step.samples)
        made.append(
            len(
                training_schedule(
                    lengths, range(len(lengths)), num_batches=count, epochs=epochs, num_ranks=1, seed=()
                )
            )
        )
    return made


@given(runs())
def test_as_many_optimizer_steps_are_made_as_the_learning_rate_was_planned_for(run):
    config, num_prompts = run
    made = updates_of(config, num_prompts)
    assert len(prompts_of_steps(config, num_prompts)) == len(made)
    assert num_updates(config, num_prompts) == sum(made)
    frozen = config.frozen_actor_steps
    assert num_updates(config, num_prompts, frozen) == sum(made[frozen:])


@pytest.mark.parametrize(
    ("prompts", "batch", "samples", "train", "episodes", "expected"),
    [
        (100, 64, 1, 16, 10, 10 * (4 + 2)),  # 64 and 36 prompts: 36 / 16 is about 2
        (65, 64, 8, 128, 10, 10 * (4 + 1)),  # a batch of one prompt is one step
        (7473, 1024, 8, 128, 1, 7 * 64 + 19),  # 305 x 8 / 128 is about 19
    ],
)
def test_short_batches_are_planned_as_such(prompts, batch, samples, train, episodes, expected):
    config = PPOConfig(
        rollout=RolloutConfig(batch_size=batch, n_samples_per_prompt=samples),
        train=TrainConfig(batch_size=train, num_episodes=episodes),
    )
    assert num_updates(config, prompts) == expected
