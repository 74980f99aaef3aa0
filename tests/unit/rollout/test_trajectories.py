"""Sequences made of turns: by hand, and for any histories."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import kept_sets, sets_of

from openrlhf.rollout.trajectories import NeverSampled, chosen_turns, trajectories
from openrlhf.types import Episode, Image, Nuclei, Outcome, Prompt, Trajectory, Turn, runs

PROMPT = Prompt(prompt_id=0, text="?")


def turn(prompt: list[int], actions: list[int], log_probs=None, versions=None, finish_reason="stop") -> Turn:
    count = len(actions)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        action_ids=np.array(actions, np.int32),
        log_probs=np.array(log_probs or [-1.0] * count, np.float32),
        weight_versions=runs(versions or [0] * count),
        kept=None if count == 1 else sets_by_log_prob(log_probs or [-1.0] * count),
        finish_reason=finish_reason,
        seed=11,
    )


def sets_by_log_prob(log_probs: list[float]) -> Nuclei:
    """Returns kept sets that identify their actions: an action's set has its log-prob once, twice and three
    times."""
    return kept_sets(*([int(-x)] * (1 + int(-x) % 3) for x in log_probs))


def episode(*turns: Turn, **changes) -> Episode:
    values = {
        "prompt": PROMPT,
        "sample_index": 2,
        "turns": list(turns),
        "seed": 11,
        "reward": 1.0,
        "score": 0.5,
    }
    return Episode(**(values | changes))


def versions_of(t: Trajectory) -> list[int]:
    return np.repeat(*t.weight_versions.T).tolist()


def test_turns_that_go_on_are_one_sequence() -> None:
    first = turn([1, 2], [5, 6], [-1.0, -2.0], [3, 3])
    second = turn([1, 2, 5, 6, 8, 9], [7], [-3.0], [4], finish_reason="length")
    (t,) = trajectories(episode(first, second, extra_logs={"calls": 2.0}))
    assert t.token_ids.tolist() == [1, 2, 5, 6, 8, 9, 7]
    assert t.action_mask.tolist() == [False, False, True, True, False, False, True]
    assert t.rollout_log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert t.weight_versions.tolist() == [[3, 2], [4, 1]]
    assert t.turn_starts.tolist() == [2, 6]
    assert (t.part, t.sample_index, t.reward, t.score, t.seed) == (0, 2, 1.0, 0.5, 11)
    assert (t.finish_reason, t.truncated, t.extra_logs) == ("length", True, {"calls": 2.0})
    dtypes = [
        x.dtype for x in (t.token_ids, t.action_mask, t.rollout_log_probs, t.weight_versions, t.turn_starts)
    ]
    assert dtypes == [np.int32, bool, np.float32, np.int32, np.int32]


def test_weights_that_did_not_change_are_one_run() -> None:
    (t,) = trajectories(episode(turn([1], [5], versions=[3]), turn([1, 5], [6], versions=[3])))
    assert t.weight_versions.tolist() == [[3, 2]]
    assert t.turn_starts.tolist() == [1, 2]


def test_a_rewritten_history_begins_a_new_trajectory() -> None:
    thinking, answer = turn([1], [8, 5]), turn([1, 5, 2], [6])  # 8, a thought, is left out
    parts = trajectories(episode(thinking, answer))
    assert [t.part for t in parts] == [0, 1]
    assert [t.token_ids.tolist() for t in parts] == [[1, 8, 5], [1, 5, 2, 6]]
    assert [t.action_mask.tolist() for t in parts] == [[False, True, True], [False, False, False, True]]
    assert [t.reward for t in parts] == [1.0, 1.0]


def test_a_turn_without_actions_has_no_reward() -> None:
    """The engine answered nothing in the second turn."""
    turns = (turn([1], [5]), turn([1, 5, 2], []), turn([1, 5, 2, 3], [6]))
    rewarded = [replace(t, reward=reward) for t, reward in zip(turns, (0.5, -1.0, 2.0), strict=True)]
    (t,) = trajectories(episode(*rewarded))
    assert t.turn_starts.tolist() == [1, 4] and t.turn_rewards.tolist() == [0.5, 2.0]


def test_conversations_side_by_side() -> None:
    parts = trajectories(episode(turn([1], [5]), turn([2], [6]), turn([1, 5, 3], [7]), turn([2, 6, 3], [8])))
    assert [t.token_ids.tolist() for t in parts] == [[1, 5, 3, 7], [2, 6, 3, 8]]


def test_a_turn_continues_the_longest_sequence() -> None:
    parts = trajectories(episode(turn([1], [5, 6]), turn([1], [5]), turn([1, 5, 6, 3], [7])))
    assert [t.token_ids.tolist() for t in parts] == [[1, 5, 6, 3, 7], [1, 5]]


def test_an_episode_without_turns_is_an_empty_trajectory() -> None:
    (t,) = trajectories(episode(outcome=Outcome.ENV_ERROR, error="lost", reward=None, score=None))
    assert (t.token_ids.tolist(), t.num_actions, t.prompt_length) == ([], 0, 0)
    assert t.weight_versions.shape == (0, 2) and t.turn_starts.tolist() == []
    assert (t.outcome, t.error, t.reward, t.truncated) == (Outcome.ENV_ERROR, "lost", None, False)


@pytest.mark.parametrize(
    ("said", "finish_reason", "truncated"),
    [(None, "length", True), (None, "stop", False), (False, "length", False), (True, "stop", True)],
)
def test_what_the_executor_says_of_truncation_stands(said, finish_reason, truncated) -> None:
    (t,) = trajectories(episode(turn([1], [5], finish_reason=finish_reason), truncated=said))
    assert t.truncated is truncated


tokens = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def histories(draw) -> list[Turn]:
    """Draws turns that go on with any earlier one, or with none, of so few tokens that histories look
    alike."""
    turns: list[Turn] = []
    for i in range(draw(st.integers(1, 6))):
        prompt = draw(tokens)
        if turns and draw(st.booleans()):
            before = draw(st.sampled_from(turns))
            prompt = before.prompt_ids.tolist() + before.action_ids.tolist() + prompt
        actions = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        log_probs = [-(10.0 * i + k) for k in range(len(actions))]
        versions = sorted(draw(st.lists(st.integers(0, 3), min_size=len(actions), max_size=len(actions))))
        turns.append(
            turn([9, *prompt] if not prompt or prompt[0] != 9 else prompt, actions, log_probs, versions)
        )
    return turns


def actions_of(t: Trajectory) -> list[tuple]:
    facts = t.action_ids.tolist(), t.rollout_log_probs.tolist(), versions_of(t)
    return list(zip(*facts, sets_of(t.kept, t.num_actions), strict=True))


@given(histories())
def test_every_action_is_there_once_with_what_was_recorded_of_it(turns: list[Turn]) -> None:
    """Log-probs differ between all actions, and identify them."""
    recorded = {}
    for each in turns:
        versions = np.repeat(*each.weight_versions.T).tolist()
        sets = sets_of(each.kept, each.num_actions)
        for fact in zip(each.action_ids.tolist(), each.log_probs.tolist(), versions, sets, strict=True):
            recorded[fact[1]] = fact
    parts = trajectories(episode(*turns))
    found = [actions_of(t) for t in parts]
    assert sorted(fact for part in found for fact in part) == sorted(recorded.values())
    for part in found:  # in the order in which they were asked for
        log_probs = [fact[1] for fact in part]
        assert log_probs == sorted(log_probs, reverse=True)


@given(histories())
def test_every_action_stands_behind_what_the_policy_had_read(turns: list[Turn]) -> None:
    first_log_prob = {float(each.log_probs[0]): each for each in turns}
    for t in trajectories(episode(*turns)):
        positions = np.flatnonzero(t.action_mask)
        for start in t.turn_starts:
            log_prob = t.rollout_log_probs[np.searchsorted(positions, start)]
            assert t.token_ids[:start].tolist() == first_log_prob[float(log_prob)].prompt_ids.tolist()


@given(histories())
def test_a_whole_history_that_an_executor_tells_is_the_recorded_one(turns: list[Turn]) -> None:
    for t in trajectories(episode(*turns)):
        changes = np.flatnonzero(np.diff(t.action_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        chosen, read = chosen_turns(t.token_ids, [(int(a), int(b)) for a, b in changes], turns)
        (told,) = trajectories(episode(*chosen))
        assert read
        assert told.token_ids.tolist() == t.token_ids.tolist()
        assert told.action_mask.tolist() == t.action_mask.tolist()


def choose(
    token_ids: list[int], ranges: list[tuple[int, int]], *turns: Turn
) -> tuple[list[Trajectory], bool]:
    chosen, read = chosen_turns(np.array(token_ids, np.int32), ranges, turns)
    return trajectories(episode(*chosen)), read


FIRST = turn([1, 2], [5, 6], [-1.0, -2.0], [3, 4])
SECOND = turn([1, 2, 5, 6, 8], [7], [-3.0], [4])


@pytest.mark.parametrize(
    ("ranges", "log_probs", "versions", "starts"),
    [
        ([(2, 4), (5, 6)], [-1.0, -2.0, -3.0], [3, 4, 4], [2, 5]),
        ([(5, 6)], [-3.0], [4], [5]),
        ([(2, 3)], [-1.0], [3], [2]),
        ([(3, 4), (4, 4), (5, 6)], [-2.0, -3.0], [4, 4], [3, 5]),
        ([(2, 3), (3, 4)], [-1.0, -2.0], [3, 4], [2, 3]),
    ],
)
def test_action_ranges_say_what_is_trained_on(ranges, log_probs, versions, starts) -> None:
    (t,), read = choose([1, 2, 5, 6, 8, 7, 9, 9], ranges, FIRST, SECOND)
    assert read
    assert t.rollout_log_probs.tolist() == log_probs and versions_of(t) == versions
    assert t.turn_starts.tolist() == starts
    known = sets_of(sets_by_log_prob(log_probs), len(log_probs))
    assert sets_of(t.kept, t.num_actions) == [[] if 3 in one else one for one in known]
    assert t.token_ids.tolist() == [1, 2, 5, 6, 8, 7][: ranges[-1][1]]  # no token follows the last action


def test_a_range_over_several_turns() -> None:
    (t,), read = choose([1, 2, 5, 6, 7], [(2, 5)], FIRST, turn([1, 2, 5, 6], [7], [-3.0]))
    assert read and t.rollout_log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert t.turn_starts.tolist() == [2, 4]


def test_the_best_of_several_answers() -> None:
    """Answers that begin alike do not get mixed up."""
    others = turn([1, 2], [5, 9], [-7.0, -8.0]), turn([1, 2], [4], [-9.0])
    for turns in ((FIRST, *others), (*others, FIRST)):
        (t,), read = choose([1, 2, 5, 6], [(2, 4)], *turns)
        assert read and t.rollout_log_probs.tolist() == [-1.0, -2.0] and t.turn_starts.tolist() == [2]


def test_an_answer_that_was_cut_and_continued() -> None:
    (t,), read = choose([1, 2, 5, 8, 7], [(2, 3), (4, 5)], FIRST, turn([1, 2, 5, 8], [7], [-3.0]))
    assert read and t.rollout_log_probs.tolist() == [-1.0, -3.0]


def test_a_part_of_an_answer_keeps_how_the_answer_ended() -> None:
    cut = replace(turn([1, 2], [5, 6], finish_reason="length"), seed=12, images=(A,))
    for tokens, ranges in (([1, 2, 5], [(2, 3)]), ([1, 5, 6], [(1, 3)])):
        (part,), _ = chosen_turns(np.array(tokens, np.int32), ranges, [cut])
        assert (part.finish_reason, part.seed, part.images) == ("length", 12, (A,))
        (t,) = trajectories(episode(part))
        assert t.truncated and t.finish_reason == "length" and t.images == (A,)


def test_an_action_behind_other_tokens_keeps_what_was_recorded_of_it() -> None:
    (t,), read = choose([1, 5, 6], [(1, 3)], FIRST)
    assert not read
    assert t.rollout_log_probs.tolist() == [-1.0, -2.0] and versions_of(t) == [3, 4]


@pytest.mark.parametrize(
    ("token_ids", "ranges", "problem"),
    [
        (
            [1, 2, 5, 4],
            [(2, 4)],
            r"\(2, 4\) has tokens that the engine never answered with: the one at 3, 4, was",
        ),
        (
            [1, 2, 5, 6],
            [(1, 4)],
            r"\(1, 4\) has tokens that the engine never answered with: the one at 1, 2, was",
        ),
        (
            [5, 6],
            [(0, 2)],
            r"\(0, 2\) begins at the first token, which nothing predicts: put the prompt before it",
        ),
        ([1, 2, 5, 6], [(2, 4), (3, 4)], r"\(3, 4\) begins before the last one ends, at 4"),
        ([1, 2, 5, 6], [(2, 5)], r"\(2, 5\) does not lie in the 4 observation_tokens"),
        ([1, 2, 5, 6], [(3, 2)], r"\(3, 2\) does not lie in the 4 observation_tokens"),
    ],
)
def test_tokens_that_nobody_sampled(token_ids, ranges, problem) -> None:
    with pytest.raises(NeverSampled, match=problem):
        choose(token_ids, ranges, FIRST, replace(FIRST))


A, B = Image("a", b"a"), Image("b", b"b")


@pytest.mark.parametrize("images", [(B,), (B, A), ()], ids=["another", "another first", "none"])
def test_a_history_with_other_images_is_another_history(images: tuple[Image, ...]) -> None:
    """The tokens of two images of one size are the same."""
    first = replace(turn([9, 9, 1], [5]), images=(A,))
    second = replace(turn([9, 9, 1, 5, 9, 9], [6]), images=images)
    found = trajectories(episode(first, second))
    assert [t.images for t in found] == [(A,), images]
    assert [t.num_actions for t in found] == [1, 1]


def test_images_are_part_of_a_history() -> None:
    first = replace(turn([9, 9, 1], [5]), images=(A,))
    goes_on = replace(turn([9, 9, 1, 5, 9, 9], [6]), images=(A, B))
    (t,) = trajectories(episode(first, goes_on))
    assert t.images == (A, B) and t.num_actions == 2
    cut, read = chosen_turns(np.array([9, 9, 1, 5]), [(3, 4)], [first])
    assert read and cut[0].images == (A,)
