"""Converts an episode's turns to the sequences to train on."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from openrlhf.types import (
    Episode,
    OneSample,
    Trajectory,
    Turn,
    join_likely,
    join_nuclei,
    not_none,
    runs,
    unrouted,
)

NO_TURN = Turn(
    prompt_ids=np.zeros(0, np.int32),
    action_ids=np.zeros(0, np.int32),
    log_probs=np.zeros(0, np.float32),
    weight_versions=np.zeros((0, 2), np.int32),
    finish_reason="abort",
    seed=0,
)
"""The turn of an episode that failed before its first answer."""


class NeverSampled(ValueError):
    """Raised for action tokens that no answer contains, and which therefore have no log-probs."""


def trajectories(episode: Episode) -> list[Trajectory]:
    """Returns the trajectories of an episode. A turn whose prompt begins with an earlier turn's prompt and
    actions continues that turn's trajectory. Otherwise the agent has rewritten its history, and a new
    trajectory begins. Every action is in exactly one trajectory."""
    histories = _histories(episode.turns or [NO_TURN])
    return [_trajectory(episode, part, turns) for part, turns in enumerate(histories)]


def _histories(turns: Sequence[Turn]) -> list[list[Turn]]:
    histories: list[list[Turn]] = []
    for turn in turns:
        begun = [history for history in histories if _continues(turn, history[-1])]
        if begun:
            max(begun, key=lambda history: _end(history[-1])).append(turn)
        else:
            histories.append([turn])
    return histories


def _continues(turn: Turn, before: Turn) -> bool:
    """Returns True if the turn's prompt begins with the prompt, the actions and the images of `before`."""
    start, prompt = len(before.prompt_ids), turn.prompt_ids
    return (
        np.array_equal(prompt[:start], before.prompt_ids)
        and np.array_equal(prompt[start : _end(before)], before.action_ids)
        and turn.images[: len(before.images)] == before.images
    )


def _end(turn: Turn) -> int:
    """Returns the length of the sequence up to the turn's end, in tokens."""
    return len(turn.prompt_ids) + len(turn.action_ids)


def _trajectory(episode: Episode, part: int, turns: Sequence[Turn]) -> Trajectory:
    last = turns[-1]
    action_mask = np.zeros(_end(last), bool)
    for turn in turns:
        action_mask[len(turn.prompt_ids) : _end(turn)] = True
    acted = [turn for turn in turns if len(turn.action_ids)]
    truncated = last.finish_reason == "length" if episode.truncated is None else episode.truncated
    return Trajectory(
        **{f.name: getattr(episode, f.name) for f in fields(OneSample)},
        part=part,
        token_ids=np.concatenate([last.prompt_ids, last.action_ids]),
        action_mask=action_mask,
        rollout_log_probs=np.concatenate([turn.log_probs for turn in turns]),
        weight_versions=_joined([turn.weight_versions for turn in turns]),
        kept=join_nuclei(turns),
        likely=join_likely(turns),
        routing=_routing(turns),
        images=last.images,
        turn_starts=np.array([len(turn.prompt_ids) for turn in acted], np.int32),
        turn_rewards=np.array([turn.reward for turn in acted if turn.reward is not None], np.float32),
        finish_reason=last.finish_reason,
        truncated=truncated,
    )


def _routing(turns: Sequence[Turn]) -> np.ndarray | None:
    """Returns the routing (L, M, K) of a sequence of turns. A token that several requests read has the
    routing of the first."""
    known = [turn for turn in turns if turn.routing is not None]
    if not known:
        return None
    whole = unrouted(_end(turns[-1]), not_none(known[0].routing))
    for turn in reversed(known):
        whole[: _end(turn) - 1] = not_none(turn.routing)[:-1]
    return whole


def _joined(weight_versions: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the weight versions of all turns, which are run-length encoded."""
    if len(weight_versions) == 1:
        return weight_versions[0]
    return runs(np.concatenate([np.repeat(*versions.T) for versions in weight_versions]))


def chosen_turns(
    token_ids: np.ndarray, action_ranges: Sequence[tuple[int, int]], turns: Sequence[Turn]
) -> tuple[list[Turn], bool]:
    """Returns the actions at `action_ranges`, [start, end) of `token_ids` (L,), as turns of this sequence,
    with the records of `turns`. Also returns True if the policy had read exactly the tokens before each
    action when it sampled the action.

    A range may cover a part of a turn or several turns. Raises NeverSampled if its tokens are not in `turns`.
    """
    where = _sampled_at(token_ids, turns)
    chosen, read, end = [], True, 0
    for start, stop in action_ranges:
        if not max(end, 1) <= start <= stop <= len(token_ids):
            raise NeverSampled(_range_problem(start, stop, end, len(token_ids)))
        end = stop
        if start == stop:
            continue
        if (where[start:stop] >= 0).all():
            chosen += _split_range(token_ids, start, stop, where, turns)
        else:
            chosen.append(_turn_with_tokens(token_ids, start, stop, where, turns))
            read = False
    return chosen, read


def _range_problem(start: int, stop: int, end: int, length: int) -> str:
    text = f"action range ({start}, {stop}) "
    if start < 1:
        return text + "begins at the first token, which nothing predicts: put the prompt before it"
    if start < end:
        return text + f"begins before the last one ends, at {end}"
    return text + f"does not lie in the {length} observation_tokens"


def _sampled_at(token_ids: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
    """Returns, for each token, the index of the turn that sampled it after exactly the preceding tokens,
    (L,); -1 if there is none."""
    matches = []  # (number of matching tokens, start, index of the turn)
    for i, turn in enumerate(turns):
        start = len(turn.prompt_ids)
        if np.array_equal(token_ids[:start], turn.prompt_ids):
            there = token_ids[start : _end(turn)]
            differs = there != turn.action_ids[: len(there)]
            matches.append((int(differs.argmax()) if differs.any() else len(there), start, i))
    where = np.full(len(token_ids), -1)
    for count, start, i in sorted(matches):  # answers may share a beginning: the longest match wins
        where[start : start + count] = i
    return where


def _split_range(
    token_ids: np.ndarray, start: int, stop: int, where: np.ndarray, turns: Sequence[Turn]
) -> Iterator[Turn]:
    """Splits a range into one turn for each recorded turn that it covers."""
    inner = np.flatnonzero(np.diff(where[start:stop])) + start + 1
    for a, b in pairwise([start, *inner.tolist(), stop]):
        turn = turns[where[a]]
        part = _part(token_ids, a, b, turn, a - len(turn.prompt_ids))
        yield replace(part, routing=None if turn.routing is None else turn.routing[:b])


def _turn_with_tokens(
    token_ids: np.ndarray, start: int, stop: int, where: np.ndarray, turns: Sequence[Turn]
) -> Turn:
    """Returns the turn whose actions are exactly these tokens, whatever its prompt was. Raises NeverSampled
    if there is none."""
    for turn in turns:
        if np.array_equal(turn.action_ids, token_ids[start:stop]):
            return _part(token_ids, start, stop, turn, 0)
    first = start + int((where[start:stop] < 0).argmax())
    raise NeverSampled(
        f"action range ({start}, {stop}) has tokens that the engine never answered with: the one at {first}, "
        f"{token_ids[first]}, was not sampled after the tokens before it"
    )


def _part(token_ids: np.ndarray, start: int, stop: int, turn: Turn, first: int) -> Turn:
    """Returns a turn with the tokens [start, stop) of `token_ids` as actions, and the records of the actions
    of `turn` from index `first` on."""
    taken = slice(first, first + stop - start)
    return Turn(
        prompt_ids=token_ids[:start],
        action_ids=token_ids[start:stop],
        log_probs=turn.log_probs[taken],
        weight_versions=runs(np.repeat(*turn.weight_versions.T)[taken]),
        finish_reason=turn.finish_reason,
        seed=turn.seed,
        kept=None if turn.kept is None else turn.kept.parts([taken])[0],
        likely=None if turn.likely is None else turn.likely[taken],
        images=turn.images,
    )
