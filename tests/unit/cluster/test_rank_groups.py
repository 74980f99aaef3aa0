"""Samples on their way to the ranks of a model, and what comes back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import (
    config_of,
    engines_of,
    group_of,
    learned_in,
    numbers_in,
    numbers_of,
    sample_of,
    schedule_of,
    start_ranks_here,
)
from records import batch_of

from openrlhf.algorithms.mismatch import MERGED
from openrlhf.cluster.rank_groups import PolicyRanks
from openrlhf.mesh import Mesh
from openrlhf.tools.doctor.health import Health
from openrlhf.types import Schedule, not_none


@pytest.fixture(autouse=True)
def everything_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ranks_here(monkeypatch)


lengths_lists = st.lists(st.integers(2, 20), min_size=1, max_size=12)


@pytest.mark.processes
@settings(deadline=None, max_examples=60)
@given(lengths_lists, st.integers(1, 5), st.booleans(), st.integers(2, 40), st.integers(1, 3))
def test_every_rank_has_a_row_and_no_row_is_too_long(lengths, num_ranks, dynamic, budget, most):
    """Rows are checked where models score and where they learn, also with fewer samples than ranks."""
    config = config_of(
        train_batch=len(lengths),
        dynamic_batch_enable=dynamic,
        max_tokens_per_gpu=budget,
        micro_batch_size=most,
    )
    config = replace(config, rollout=replace(config.rollout, micro_batch_size=most))
    batch = batch_of([sample_of(length, number) for number, length in enumerate(lengths)], log_probs=0.0)
    policy = group_of(PolicyRanks, config, num_ranks, slope=1.0)
    answers = policy.forward(batch).result()
    updated = policy.update(replace(batch, log_probs=None), schedule_of(batch, 1, num_ranks), 0.0).result()

    first = batch.select(updated.first)
    assert sorted(updated.first) == list(range(len(batch)))
    assert not_none(updated.log_probs).tolist() == first.token_ids[first.action_mask].tolist()
    assert answers.tolist() == batch.token_ids[batch.action_mask].tolist()
    scored = [rows for engine in engines_of(policy) for rows in engine.asked]
    learned = [[row.row for row in step] for engine in engines_of(policy) for step in engine.learned]
    for ranks in (scored, learned):
        assert len(ranks) == num_ranks and all(ranks)
        assert sorted(n for rows in ranks for n in numbers_in(rows)) == list(range(len(lengths)))
        for row in (row for rows in ranks for row in rows):
            assert len(row.lengths) == 1 or (
                sum(row.lengths) <= budget if dynamic else len(row.lengths) <= most
            )


def test_nine_samples_occupy_all_of_four_ranks():
    """A wrong schedule would put the samples on three ranks with three samples each."""
    policy = group_of(PolicyRanks, config_of(), 4)
    batch = batch_of([sample_of(5, number) for number in range(9)], log_probs=0.0)
    policy.forward(batch).result()
    policy.update(batch, schedule_of(batch, 1, 4), 0.0).result()
    engines = engines_of(policy)
    assert sorted(len(numbers_in(engine.asked[0])) for engine in engines) == [2, 2, 2, 3]
    assert sorted(len(learned_in(engine.learned[0])) for engine in engines) == [2, 2, 2, 3]


@pytest.mark.parametrize("mesh", [Mesh(data=2, sequence=2), Mesh(data=2, tensor=2)])
def test_ranks_that_share_samples_get_the_same_ones(mesh):
    """Each sample is scored and learned from once along the data dimension."""
    policy = group_of(PolicyRanks, config_of(), mesh, slope=1.0)
    batch = batch_of([sample_of(5, number) for number in range(9)], log_probs=0.0)
    assert policy.forward(batch).result().tolist() == batch.token_ids[batch.action_mask].tolist()
    policy.update(batch, schedule_of(batch, 1, mesh.data), 0.0).result()
    for read in (lambda engine: numbers_in(engine.asked[0]), lambda engine: learned_in(engine.learned[0])):
        one, same, two, again = (read(engine) for engine in engines_of(policy))
        assert one == same and two == again and sorted(one + two) == list(range(9))


def test_a_sample_travels_to_one_rank_only():
    """A sample is sent once to be scored and once to be learned from, whatever the other ranks get."""
    policy = group_of(PolicyRanks, config_of(train_batch=4), 3)
    batch = batch_of([sample_of(3 + number % 5, number) for number in range(12)], log_probs=0.0)
    policy.forward(batch).result()
    policy.update(batch, schedule_of(batch, 3, 3), 0.0).result()
    for method in ("forward", "update"):
        shares = [args[0] for handle in policy.workers for name, args in handle.sent if name == method]
        assert len(shares) == 3
        assert sorted(number for share in shares for number in numbers_of(share)) == list(range(12))


def test_a_sample_of_several_epochs_travels_once():
    policy = group_of(PolicyRanks, config_of(), 1)
    batch = batch_of([sample_of(3, number) for number in range(4)], log_probs=0.0)
    policy.update(batch, [[[3, 1]], [[0]], [[1, 0]], [[3]]], 0.0).result()
    ((share, mini_batches, *_),) = [args for name, args in policy.workers[0].sent if name == "update"]
    assert numbers_of(share) == [0, 1, 3] and mini_batches == [[2, 1], [0], [1, 0], [2]]
    (engine,) = engines_of(policy)
    assert [sorted(learned_in(step)) for step in engine.learned] == [[1, 3], [0], [0, 1], [3]]


def test_an_update_tells_log_probs_of_the_policy_before_it():
    """Log-probs are those that its first optimizer step reads, and no later one; a batch that brings its own
    gets none."""
    policy = group_of(PolicyRanks, config_of(), 2)
    batch = batch_of([sample_of(3 + number, number) for number in range(4)])

    def told(schedule: Schedule) -> list[int]:
        updated = policy.update(batch, schedule, 0.0).result()
        first = batch.select(updated.first)
        assert not_none(updated.log_probs).tolist() == first.token_ids[first.action_mask].tolist()
        return updated.first

    assert told([[[3, 1], [0, 2]]]) == [3, 1, 0, 2]
    assert told([[[3], [0]], [[1], [2]]]) == [3, 0]
    assert told([[[3, 1], [0]]]) == [3, 1, 0]
    assert told([[[3], []], [[1], [2]]]) == [3]
    known = batch_of([sample_of(3)] * 4, log_probs=0.0)
    assert policy.update(known, [[[3, 1], [0, 2]]], 0.0).result().log_probs is None


def test_an_update_tells_what_rounding_left_of_the_adapters_in_the_engines():
    policy = group_of(PolicyRanks, config_of(), 2)
    batch = batch_of([sample_of(3)] * 4)
    assert MERGED not in policy.update(batch, [[[3, 1], [0, 2]]], 0.0).result().metrics
    for engine in engines_of(policy):
        engine.merged_fraction = 0.25
    metrics = policy.update(batch, [[[3], [0]], [[1], [2]]], 0.0).result().metrics
    assert metrics[MERGED] == 0.25
    assert any("--vllm.lora_sync adapter" in text for text in Health().check(metrics))
