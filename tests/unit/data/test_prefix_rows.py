"""Sequences with common prefixes are laid side by side: in the rows of supervised steps, over ranks, and in
the optimizer steps of an RL step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from common_prefixes import families, sharing_from_one_token
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.ppo import PPOConfig, RolloutConfig, TrainConfig
from openrlhf.config.ppo_checks import ppo_problems
from openrlhf.data.batches import Dataset, MiniBatches
from openrlhf.data.preference import PairDataset
from openrlhf.data.prefixes import REPEATED_TOKEN, Neighbours
from openrlhf.data.related import identities, parts_of_related, rows_of_related
from openrlhf.data.store import SampleStore
from openrlhf.data.unpaired import UnpairedDataset
from openrlhf.training.schedule import training_schedule
from openrlhf.types import Batch, Image

COLLATE: Any = list
"""Rows are not packed."""
PROMPTS = ([*range(20, 40)], [*range(50, 70)])


def stored(*sequences: Sequence[int]) -> SampleStore:
    store = SampleStore()
    for sequence in sequences:
        store.append(sequence, [False] + [True] * (len(sequence) - 1))
    return store


def rows_of(dataset: Dataset, **options: Any) -> list[list[list[int]]]:
    """Returns the items of the rows of each rank in the first step, which has all items."""
    ranks = options.pop("ranks", 1)
    layout: dict[str, Any] = {"batch_size": len(dataset), "seed": 0, "shuffle": False} | options
    mini_batches = [
        MiniBatches(dataset, COLLATE, data_rank=rank, data_size=ranks, shares_prefixes=True, **layout)
        for rank in range(ranks)
    ]
    return [next(each.items(0)) for each in mini_batches]


def pairs_of(store: SampleStore) -> PairDataset:
    margins = np.zeros(len(store) // 2, np.float32)
    return PairDataset.from_arrays(store.arrays() | {"margins": margins}, store.meta())


def pairs() -> PairDataset:
    """Returns two pairs of answers of five tokens to each prompt, in turns."""
    answer = iter(range(100, 200))
    samples = [PROMPTS[i // 2 % 2] + [next(answer)] * 5 for i in range(8)]
    return pairs_of(stored(*samples))


def test_rows_of_pairs_count_their_prompt_once() -> None:
    """A pair has 50 tokens, 30 in its tree, and two pairs of a prompt 40."""
    repeated = 20 * REPEATED_TOKEN
    assert sorted(rows_of(pairs(), max_tokens=int(30 + repeated))[0]) == [[0], [1], [2], [3]]
    ((*rows,),) = rows_of(pairs(), max_tokens=int(40 + 3 * repeated) + 1)
    assert sorted(map(sorted, rows)) == [[0, 2], [1, 3]]
    rows = rows_of(pairs(), max_tokens=int(40 + 3 * repeated) + 1, ranks=2)
    assert sorted(sorted(row) for rank in rows for row in rank) == [[0, 2], [1, 3]]


def test_pairs_with_a_prompt_of_their_own_fill_rows_by_their_trees() -> None:
    samples = [[*range(100 * i, 100 * i + 20), 9, 9, 9 + side] for i in range(1, 5) for side in (0, 1)]
    dataset = pairs_of(stored(*samples))
    of_pair = 23 + 1 + 22 * REPEATED_TOKEN
    assert [len(row) for row in rows_of(dataset, max_tokens=int(2 * of_pair) + 1)[0]] == [2, 2]


def test_completions_of_a_prompt_are_in_one_row_of_kto() -> None:
    """A mismatched answer is read in another row, so it has nothing in common with the answer."""
    samples = [PROMPTS[i // 2 % 2] + [100 + i] * 5 for i in range(8)]
    store = stored(*samples)
    dataset = UnpairedDataset.from_arrays(store.arrays() | {"desirable": np.ones(4, bool)}, store.meta())
    of_two = 2 * (20 + 5 + 5 + 20 * REPEATED_TOKEN)
    assert sorted(map(sorted, rows_of(dataset, max_tokens=int(of_two) + 1)[0])) == [[0, 2], [1, 3]]
    assert len(rows_of(dataset, max_tokens=int(of_two) - 1)[0]) == 4


def test_turns_of_a_conversation_are_in_one_row() -> None:
    first, second = ([*range(start, start + 40)] for start in (100, 200))
    dataset = stored(first[:15], second[:15], first, second, first[:30], second[:30])
    assert sorted(map(sorted, rows_of(dataset, micro_batch_size=3)[0])) == [[0, 2, 4], [1, 3, 5]]
    repeated = 45 * REPEATED_TOKEN
    assert len(rows_of(dataset, max_tokens=int(40 + repeated) + 1)[0]) == 2


def test_rows_without_common_prefixes_are_those_without_sharing() -> None:
    dataset = stored(*([i] * length for i, length in enumerate((5, 9, 17, 3, 8, 12, 4), start=1)))
    for options in ({"max_tokens": 20}, {"micro_batch_size": 2}):
        mini_batches = MiniBatches(
            dataset, COLLATE, batch_size=7, data_rank=0, data_size=1, seed=0, shuffle=False, **options
        )
        assert rows_of(dataset, **options) == [next(mini_batches.items(0))]


@given(
    families(),
    st.integers(1, 4),
    st.sampled_from(
        [{"max_tokens": 9}, {"max_tokens": 40}, {"micro_batch_size": 1}, {"micro_batch_size": 3}]
    ),
    st.booleans(),
)
def test_every_item_is_in_one_row(sequences: list, ranks: int, options: dict, are_pairs: bool) -> None:
    sequences = [sequence or [5] for sequence in sequences]
    if are_pairs:
        store = stored(*(sequence for sequence in sequences for _ in "ab"))
        dataset: Dataset = pairs_of(store)
    else:
        dataset = stored(*sequences)
    with sharing_from_one_token():
        rows = rows_of(dataset, ranks=ranks, **options)
    assert sorted(i for rank in rows for row in rank for i in row) == [*range(len(sequences))]
    assert len({len(rank) for rank in rows}) == 1  # ranks meet in collectives at each row
    if size := options.get("micro_batch_size"):
        assert max(len(row) for rank in rows for row in rank) <= size
        counts = [sum(map(len, rank)) for rank in rows]
        assert max(counts) - min(counts) <= 1


# ---- what a batch's tokens are


def batch_of(*sequences: Sequence[int], **columns: Any) -> Batch:
    """Returns a batch whose last tokens are actions."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.zeros(lengths.sum(), bool)
    mask[lengths.cumsum() - 1] = True
    return Batch(
        token_ids=np.concatenate([np.array(sequence, np.int32) for sequence in sequences]),
        action_mask=mask,
        lengths=lengths,
        num_actions=np.ones(len(sequences), np.int64),
        rollout_log_probs=np.zeros(len(sequences), np.float32),
        **columns,
    )


def rows_of_batch(batch: Batch, *, with_routing: bool) -> list[list[int]] | None:
    routing = batch.routing if with_routing else None
    token_ids = identities(batch.token_ids, batch.lengths, images=batch.images, routing=routing)
    return rows_of_related(token_ids, batch.lengths.tolist(), max_tokens=None, max_sequences=2)


FOUR = [PROMPTS[i % 2] + [100 + i] * 3 for i in range(4)]


def test_samples_that_were_routed_otherwise_have_nothing_in_common() -> None:
    routing = np.ones((92, 2, 2), np.uint8)
    routing[:, :, 1] = 3
    same = batch_of(*FOUR, routing=routing)
    assert rows_of_batch(same, with_routing=True) == [[0, 2], [1, 3]]
    other = routing.copy()
    other[[46, 69], 1] = (3, 1)  # the second sample of each prompt, at its first token
    assert rows_of_batch(replace(same, routing=other), with_routing=True) is None
    assert rows_of_batch(replace(same, routing=other), with_routing=False) == [[0, 2], [1, 3]]
    late = routing.copy()
    late[46 + 19, 0] = (2, 3)  # the last token of the prompt
    assert rows_of_batch(replace(same, routing=late), with_routing=True) == [[0, 2], [1, 3]]


def test_samples_with_other_images_have_nothing_in_common() -> None:
    images = [Image(reference="a", data=b"one"), Image(reference="b", data=b"one"), Image("c", b"two")]
    same = batch_of(*FOUR, images=((images[0],), (), (images[1],), ()))
    assert rows_of_batch(same, with_routing=False) == [[0, 2], [1, 3]]
    other = replace(same, images=((images[0],), (images[0],), (images[2],), (images[2],)))
    assert rows_of_batch(other, with_routing=False) is None


# ---- optimizer steps of an RL step


def test_steps_of_groups_have_all_samples_of_a_prompt() -> None:
    groups = [i % 6 for i in range(24)]
    steps = training_schedule(
        [9] * 24, range(24), num_batches=3, epochs=2, num_ranks=2, seed=(0,), groups=groups
    )
    assert len(steps) == 6
    for epoch in (steps[:3], steps[3:]):
        chosen = [{groups[i] for rank in ranks for i in rank} for ranks in epoch]
        assert [len(of_step) for of_step in chosen] == [2, 2, 2]
        assert set.union(*chosen) == set(range(6))
    assert steps[:3] != steps[3:]


def test_groups_of_one_sample_are_shuffled_as_samples() -> None:
    options: dict[str, Any] = {"num_batches": 3, "epochs": 2, "num_ranks": 2, "seed": (4, 2)}
    lengths = [3 + i % 5 for i in range(20)]
    trained_on = [i for i in range(20) if i % 7]
    by_sample = training_schedule(lengths, trained_on, **options)
    assert by_sample == training_schedule(lengths, trained_on, **options, groups=range(20))


def test_the_samples_of_a_step_do_not_depend_on_sharing() -> None:
    sequences = [PROMPTS[i % 2] + [100 + i] * (3 + i % 4) for i in range(16)]
    lengths, token_ids = [len(s) for s in sequences], np.concatenate([np.array(s) for s in sequences])
    options: dict[str, Any] = {"num_batches": 2, "epochs": 1, "num_ranks": 2, "seed": (1,)}
    whole = training_schedule(lengths, range(16), **options)
    shared = training_schedule(lengths, range(16), **options, token_ids=token_ids)
    samples = lambda steps: [sorted(i for rank in ranks for i in rank) for ranks in steps]
    assert samples(whole) == samples(shared)


@pytest.mark.parametrize(("batch_size", "problems"), [(3, ["train.shuffle"]), (4, [])])
def test_a_step_has_room_for_the_samples_of_a_prompt(batch_size: int, problems: list[str]) -> None:
    config = PPOConfig(
        rollout=RolloutConfig(batch_size=6, n_samples_per_prompt=4),
        train=TrainConfig(batch_size=batch_size, shuffle="group"),
    )
    found = [problem.key for problem in ppo_problems(config, {}) if "shuffle" in problem.key]
    assert found == problems


def test_the_models_of_a_step_compare_its_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = Neighbours.of
    monkeypatch.setattr(
        Neighbours, "of", lambda cells, n: compared.append(cells[20, 0]) or original(cells, n)
    )
    prompt, lengths = [*range(20, 40)], [21] * 8
    first, other = (np.array(([*prompt, end] * 8), np.int32) for end in (1, 2))
    parts = [parts_of_related(identities(ids, lengths), lengths, 2) for ids in (first, first, other, first)]
    assert compared == [1, 2, 1]
    parts_of_related(first, [84, 84], 2)  # the same tokens, divided in another way
    assert compared == [1, 2, 1, 1]
    assert parts[0] == parts[1] == parts[3] and sorted(i for part in parts[0] for i in part) == [*range(8)]


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=2, max_size=20), st.randoms())
def test_neighbours_of_some_sequences_are_those_of_a_comparison_of_these_alone(sequences, rng):
    compare = lambda chosen: Neighbours.of(
        np.array([x for own in chosen for x in own], np.int32)[:, None], np.array([len(x) for x in chosen])
    )
    indices = rng.sample(range(len(sequences)), rng.randrange(1, len(sequences) + 1))
    found = compare(sequences).select(np.array(indices), np.array([len(x) for x in sequences]))
    expected = compare([sequences[i] for i in indices])
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
