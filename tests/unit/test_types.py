"""Records of a rollout are cut, joined and sent."""

import base64
import pickle
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import batch_of, kept_sets, plain, sets_of, trajectory

from openrlhf.rows import ExperienceRow, PackedRow
from openrlhf.types import _ARRAYS, Batch, Image, Prompt, PromptGroup, Trajectory, runs

# ---- runs


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3, 3, 5, 3], [[3, 2], [5, 1], [3, 1]]), ([0], [[0, 1]]), ([-1, -1, 0], [[-1, 2], [0, 1]]), ([], [])],
)
def test_runs_by_hand(values, expected):
    found = runs(values)
    assert found.tolist() == expected
    assert found.shape == (len(expected), 2) and found.dtype == np.int32


@given(st.lists(st.integers(0, 3), max_size=20))
def test_runs_say_everything_and_no_more(values):
    versions, counts = runs(values).T
    assert np.repeat(versions, counts).tolist() == values
    assert (np.diff(versions) != 0).all() and (counts > 0).all()


# ---- trajectories and groups


def test_what_a_trajectory_knows_of_its_actions():
    t = trajectory(token_ids=[9, 8, 7, 6, 5], action_mask=[False, False, True, False, True], epoch=2)
    assert t.action_ids.tolist() == [7, 5]
    assert (t.num_actions, t.prompt_length, t.group) == (2, 2, (2, 0))
    nothing = trajectory(token_ids=[9, 8], action_mask=[False, False])
    assert (nothing.num_actions, nothing.prompt_length) == (0, 2)


def group(size: int) -> PromptGroup:
    """Returns samples of different lengths, the first without a turn or an action."""
    prompt = Prompt(prompt_id=4, text="why?", messages=[{"role": "user", "content": "why?"}])
    samples = [
        trajectory(
            None if i == 1 else i / 2,
            range(i),
            prompt=prompt,
            sample_index=i,
            part=i % 2,
            versions=[k // 2 for k in range(i)],
            turn_starts=[1] if i else [],
            turn_rewards=[0.5] if i else [],
            truncated=i > 1,
            seed=2**62 + i,
            extra_logs={"steps": float(i)},
        )
        for i in range(size)
    ]
    return PromptGroup(prompt=prompt, trajectories=samples)


def sent(group: PromptGroup) -> tuple[PromptGroup, list[pickle.PickleBuffer]]:
    """Returns the group after a transfer between processes, and the arrays that travelled apart from the
    rest."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers), buffers


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_a_group_arrives_as_it_was_sent(size):
    arrived, _ = sent(group(size))
    assert plain(arrived) == plain(group(size))
    assert all(t.prompt is arrived.prompt for t in arrived.trajectories)
    assert plain(pickle.loads(pickle.dumps(arrived))) == plain(arrived)


def test_a_group_travels_as_one_array_for_each_field():
    for size in (2, 50):
        _, buffers = sent(group(size))
        assert len(buffers) == len(_ARRAYS)


def test_what_arrives_is_not_copied():
    arrived, buffers = sent(group(5))
    received = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    for name in _ARRAYS:
        arrays = [getattr(t, name) for t in arrived.trajectories if getattr(t, name).size]
        assert arrays and all(any(np.shares_memory(a, whole) for whole in received) for a in arrays)


# ---- batches


def test_a_batch_by_hand():
    one = trajectory(token_ids=[1, 2, 3], action_mask=[False, True, False], rollout_log_probs=[-0.5])
    two = trajectory(token_ids=[4, 5], action_mask=[False, True], rollout_log_probs=[-0.25])
    batch = Batch.of([one, two, one])
    assert len(batch) == 3
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3] and batch.token_ids.dtype == np.int32
    assert batch.action_mask.tolist() == [False, True, False, False, True, False, True, False]
    assert batch.lengths.tolist() == [3, 2, 3] and batch.num_actions.tolist() == [1, 1, 1]
    assert batch.rollout_log_probs.tolist() == [-0.5, -0.25, -0.5]
    last_first = batch_of([one, two, one], advantages=[1.0, 2.0, 3.0]).select([2, 1])
    assert last_first.token_ids.tolist() == [1, 2, 3, 4, 5] and last_first.lengths.tolist() == [3, 2]
    assert last_first.advantages is not None and last_first.advantages.tolist() == [3, 2]
    assert last_first.values is None


@st.composite
def batches(draw) -> Batch:
    """Draws sequences whose first token is their number, of 0 to 4 actions each, where every action has
    another value in each column."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    with_sets = draw(st.booleans())
    samples = [
        trajectory(
            1.0,
            token_ids=[i, *range(n)],
            kept=kept_sets(*([100 * i + k] * k for k in range(n))) if with_sets and i % 2 else None,
        )
        for i, n in enumerate(counts)
    ]
    values = np.arange(sum(counts), dtype=np.float32)
    known = {name: values + k for k, name in enumerate(("log_probs", "values")) if draw(st.booleans())}
    if draw(st.booleans()):
        known["staleness"] = np.arange(sum(counts), dtype=np.int32)
    return batch_of(samples, rollout_log_probs=values, advantages=-values, **known)


def test_staleness_by_hand():
    """Actions have versions 4, 5, 5 and 3, 5, one sample has none, and the weights are of version 5."""
    samples = [
        trajectory(1.0, (5, 6, 7), versions=[4, 5, 5]),
        trajectory(1.0, (), versions=[]),
        trajectory(1.0, (8, 9), versions=[3, 5]),
    ]
    stale = Batch.of(samples, version=5)
    assert plain(stale.staleness) == ("int32", [1, 0, 0, 2, 0])
    assert plain(stale.select([2, 0]).staleness) == ("int32", [2, 0, 1, 0, 0])
    assert ExperienceRow.of(replace(stale, advantages=np.zeros(5), returns=np.zeros(5))).staleness is not None
    assert Batch.of(samples).staleness is None
    fresh = [trajectory(1.0, (5, 6), versions=[5, 5]), samples[1]]
    assert Batch.of(fresh, version=5).staleness is None
    assert Batch.of(samples[1:2], version=5).staleness is None


def indices(batch: Batch) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(batch) - 1), max_size=12)


@given(batches(), st.data())
def test_what_is_said_of_shares_is_put_together_in_the_order_of_the_batch(batch, data):
    """The shares may be empty."""
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    order = data.draw(st.permutations(range(len(batch))))
    shares = [[i for i in order if owners[i] == owner] for owner in range(4)]
    parts = [batch.select(share) for share in shares]
    assert sum(map(len, parts)) == len(batch)
    for read in (lambda part: part.rollout_log_probs, lambda part: part.advantages.astype(np.float64)):
        together = batch.put_together(shares, [read(part) for part in parts])
        assert plain(together) == plain(read(batch))


@given(batches(), st.data())
def test_a_selection_of_a_selection_is_a_selection(batch, data):
    first = data.draw(indices(batch).filter(bool))
    second = data.draw(indices(batch.select(first)))
    assert plain(batch.select(first).select(second)) == plain(batch.select([first[i] for i in second]))


@given(batches(), st.data())
def test_a_selection_has_the_sequences_asked_for(batch, data):
    chosen = data.draw(indices(batch))
    selected = batch.select(chosen)
    starts = selected.lengths.cumsum() - selected.lengths
    assert selected.token_ids[starts].tolist() == chosen
    assert selected.lengths.sum() == len(selected.token_ids) == len(selected.action_mask)
    assert selected.num_actions.sum() == len(selected.rollout_log_probs) == selected.action_mask.sum()
    if selected.kept is not None:
        number = np.array(chosen).repeat(selected.num_actions)
        for i, one in zip(number, sets_of(selected.kept, len(number)), strict=True):
            assert all(token // 100 == i for token in one) and (i % 2 or not one)
    assert plain(batch.select(range(len(batch)))) == plain(batch)


# ---- rows


def test_a_row_of_a_batch():
    row = PackedRow.from_batch(Batch.of([trajectory(1.0, (5, 6)), trajectory(1.0, (7,))]))
    assert row.token_ids.tolist() == [1, 5, 6, 1, 7] and row.token_ids.dtype == torch.int64
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1] and row.position_ids.dtype == torch.int64
    assert row.action_mask.tolist() == [False, True, True, False, True]
    assert row.lengths == (3, 2) and row.num_actions.tolist() == [2, 1]


def test_a_batch_without_sequences_is_a_dummy_row():
    nothing = batch_of([trajectory()], log_probs=-1.0, values=0.5).select([])
    row = PackedRow.from_batch(nothing)
    assert (row.num_tokens, row.num_sequences, row.lengths) == (0, 0, (2,))
    assert len(row.token_ids) == len(row.position_ids) == len(row.action_mask) == 2
    experience = ExperienceRow.of(nothing)
    assert (experience.num_tokens, experience.num_sequences) == (0, 0)
    for column in (experience.advantages, experience.returns, experience.old_log_probs, experience.values):
        assert column is not None and column.shape == (0,)


def test_columns_that_are_not_known_are_not_in_the_row():
    samples: list[Trajectory] = [trajectory(1.0, (5, 6), rollout_log_probs=[-0.5, -1.5])]
    row = ExperienceRow.of(batch_of(samples, advantages=[1.0, 2.0], returns=[3.0, 4.0]))
    assert row.advantages.tolist() == [1, 2] and row.returns.tolist() == [3, 4]
    assert row.rollout_log_probs.tolist() == [-0.5, -1.5]
    assert row.old_log_probs is None and row.ref_log_probs is None and row.values is None
    known = batch_of(samples, log_probs=-1.0, ref_log_probs=-2.0, values=0.5)
    row = ExperienceRow.of(known)
    columns = (row.old_log_probs, row.ref_log_probs, row.values)
    assert [column.tolist() for column in columns if column is not None] == [[-1] * 2, [-2] * 2, [0.5] * 2]
    with pytest.raises(AssertionError):
        ExperienceRow.of(replace(known, advantages=None))


def test_images_go_with_their_sequences():
    """Images go through a row too, and in one copy for all samples of a prompt."""
    a, b = Image("a", b"a" * 10_000), Image("b", b"b")
    own = [(a,), (), (b, a)]
    samples = [replace(trajectory(i / 2, range(i + 2)), images=images) for i, images in enumerate(own)]
    batch = Batch.of(samples)
    assert batch.images == tuple(own)
    chosen = batch.select([2, 0])
    assert chosen.images == ((b, a), (a,)) == PackedRow.from_batch(chosen).to("cpu").images
    assert PackedRow.empty().images == Batch.of(samples[1:2]).images == ()
    prompt = Prompt(prompt_id=0, text="?", images=(a,))
    same = [replace(t, images=(a,), prompt=prompt) for t in samples * 4]
    sent = pickle.dumps(PromptGroup(prompt=prompt, trajectories=same))
    assert len(sent) < 2 * len(a.data)
    assert [t.images for t in pickle.loads(sent).trajectories] == [(a,)] * 12


GROUP_OF_VERSION_1 = """
    eNp9UsFq20AQXcly7NZu0lAogfbQo03BkBDIpeBDDoEuqKU99dAukrz2CltasVo1GGpID04r2Fuml/5MfqWf0D9oR9o4uEHp
    wohZ7bz39s3OhffjZ4vUy+zKjKdqIaYjvcx4DuYRK9IsiOZspmSRwRUMBDE7b5VMMo274Vf4CAPaMd7Ry6MxGOcYjJcXSQ7U
    9YeU8HAFA/NAyzlPWTxBwqdpkWTLEYuk4qOkWOg4UCpYgukzxSOZ5loVUUVt2nUlmE46sSVXQMkaTp0QvsE7VHWotwaxZ9qT
    6rIVxI2PofxuT1vGeQW+77/+g6v+UKIhLE8fO+jUw2hjVDng78pFizr8EkwviHQsU5YE+RzErtivVMWTbc0D44aH20pfGpU8
    4jh32feVXCxkodlCzlimZJg3aLhWY7rlRjxvUugScnFdxUbFxZ6jyt45j2dCs89c5eilUYO6lyCeYT9aN33w7vTjhqunC5Wy
    XAdKN/FUG2S5RRGL6tcoxc8DNbkPdlIK+g+qwLTOh2fjX3YkbxOcu86bQkcysU8t57BGLkOqidMyg5L2VmB2plIlgYaz8W+L
    y7XVG/q++GD69kaMKyWVJXiYyhcyi1PsE4hPJSUrtMJRrkt5pt9zdL0Z9OaXQvfd7d7dX+XaK/2n6gSrDtTh9aaKh77G49Ff
    P6hHxw==
"""
"""Group of a checkpoint of release 0.1, which calls an epoch episode: its pickle, packed, as base64."""


def test_groups_in_checkpoints_of_earlier_versions_are_read():
    group = pickle.loads(zlib.decompress(base64.b64decode(GROUP_OF_VERSION_1)))
    prompt = Prompt(prompt_id=7, text="2+2?", label="4", source="sums", epoch=2)
    learned = trajectory(
        0.5,
        (4, 5),
        prompt=prompt,
        versions=(3, 4),
        seed=11,
        extra_logs={"format": 1.0},
        kept=kept_sets([4, 1], [], shares=[0.5, 1.0]),
    )
    failed = trajectory(None, (), prompt=prompt, sample_index=1, kept=kept_sets())
    assert group.prompt == prompt
    assert [plain(t) for t in group.trajectories] == [plain(t) for t in (learned, failed)]


def test_the_prompts_of_actions_are_numbered_by_group() -> None:
    """Two prompts of one epoch, and the first of them again in the next."""
    places = [(7, 0), (3, 0), (7, 1), (7, 0)]
    counts = [2, 1, 0, 1]
    samples = [
        trajectory(token_ids=range(n + 1), action_mask=[False] + [True] * n, prompt_id=prompt, epoch=epoch)
        for (prompt, epoch), n in zip(places, counts, strict=True)
    ]
    batch = Batch.of(samples, by_prompt=True)
    assert batch.prompts is not None and batch.prompts.tolist() == [0, 0, 1, 0]
    assert Batch.of(samples).prompts is None
