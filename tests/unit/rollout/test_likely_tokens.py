"""The sampler's most likely tokens: an engine answers with them, and they stay with their actions."""

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from records import trajectory
from sampled_logits import LOGITS, Sampled

from openrlhf.backends.vllm.requests import vllm_params
from openrlhf.checkpoint.pickles import load
from openrlhf.completions import SamplingParams
from openrlhf.observability.journal import Journal, read_journal
from openrlhf.observability.rollout_table import LIKELY_TOKENS, to_table, to_trajectories
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.rollout.trajectories import chosen_turns, trajectories
from openrlhf.rows import ExperienceRow
from openrlhf.types import LIKELY, Batch, Episode, Prompt, PromptGroup, Turn, not_none, runs


def recorded(tokens: list[int], **params: Any) -> tuple[Turn, torch.Tensor]:
    """Returns the turn, and the log-probs that were sampled from."""
    engine = Sampled(LOGITS[: len(tokens)], tokens)
    recording = RecordingEngine(engine, (0,), SamplingParams(), max_kept_tokens=6, num_likely=3)
    asyncio.run(recording.generate([1], SamplingParams(**params)))
    (turn,) = recording.turns
    return turn, not_none(engine.log_probs)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 2}, {"logprobs": 7}])
def test_an_answer_has_the_most_likely_tokens_whether_or_not_they_were_sampled(params: dict) -> None:
    """The first action is not among the three most likely tokens unless truncation leaves no other."""
    turn, log_probs = recorded([2 if "top_k" in params or "top_p" in params else 4, 0], **params)
    likely, expected = not_none(turn.likely), log_probs.topk(3, -1).values
    assert likely.shape == (2, 3) and likely.dtype == LIKELY
    ids = torch.from_numpy(likely["id"].astype(np.int64))
    torch.testing.assert_close(torch.from_numpy(likely["log_prob"].copy()), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(log_probs.gather(1, ids), expected)
    assert (turn.kept is None) == ("top_p" not in params and "top_k" not in params)


def test_what_a_request_asks_for() -> None:
    def asked(likely: int, kept: int = 0, **params: Any) -> int | None:
        own = {"max_kept_tokens": kept, "num_likely": likely} | params
        return vllm_params(SamplingParams(**own)).logprobs

    assert asked(0) is None and asked(5) == 5 and asked(5, logprobs=9) == 9 and asked(5, logprobs=-1) == -1
    assert asked(5, 8, top_p=0.9) == 8 and asked(9, 8, top_p=0.9) == 9 and asked(9, 8, top_k=3) == 9
    assert asked(2, 8, top_k=3) == 4


def test_an_answer_without_tokens() -> None:
    turn, _ = recorded([], top_p=0.8)
    assert not_none(turn.likely).shape == (0, 3)


# ---- tokens stay with their actions


def tokens(*first: int) -> np.ndarray:
    """Returns two likely tokens for each action, with the ids n and n + 1, and -n / 8 as a log-prob."""
    made = np.empty((len(first), 2), LIKELY)
    for row, n in zip(made, first, strict=True):
        row[:] = [(n, -n / 8), (n + 1, -np.inf)]
    return made


def firsts(likely: np.ndarray | None) -> list[int]:
    """Returns the first ids of `tokens`."""
    found = not_none(likely)
    np.testing.assert_array_equal(found, tokens(*found["id"][:, 0]))
    return found["id"][:, 0].tolist()


def turn(prompt: list[int], actions: list[int], first: int) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        action_ids=np.array(actions, np.int32),
        log_probs=np.zeros(len(actions), np.float32),
        weight_versions=runs([0] * len(actions)),
        finish_reason="stop",
        seed=0,
        likely=tokens(*range(first, first + len(actions))),
    )


def test_of_turns_and_parts_of_turns() -> None:
    first, second = turn([1], [5, 6, 7], 10), turn([1, 5, 6, 7, 9], [8, 8], 20)
    episode = Episode(prompt=Prompt(prompt_id=0, text=""), sample_index=0, reward=1.0, turns=[first, second])
    (whole,) = trajectories(episode)
    assert firsts(whole.likely) == [10, 11, 12, 20, 21]
    chosen, _ = chosen_turns(whole.token_ids, [(2, 4), (6, 7)], episode.turns)
    (some,) = trajectories(replace(episode, turns=chosen))
    assert firsts(some.likely) == [11, 12, 21]
    (lacking,) = trajectories(replace(episode, turns=[replace(first, likely=None), second]))
    assert lacking.likely is None
    (failed,) = trajectories(replace(episode, turns=[], reward=None))
    assert failed.likely is None


ONE, TWO = trajectory(actions=(4, 3), likely=tokens(7, 9)), trajectory(actions=(5,), likely=tokens(2))
FAILED = trajectory(None, ())


def test_of_a_batch_and_its_rows() -> None:
    batch = Batch.of([ONE, FAILED, TWO])
    assert firsts(batch.likely) == [7, 9, 2]
    row = ExperienceRow.of(replace(batch.select([2, 0]), advantages=np.zeros(3), returns=np.zeros(3)))
    assert not_none(row.likely_ids).tolist() == [[2, 3], [7, 8], [9, 10]]
    assert not_none(row.likely_ids).dtype == torch.int64
    assert not_none(row.likely_log_probs)[:, 0].tolist() == [-2 / 8, -7 / 8, -9 / 8]
    assert not_none(row.empty().likely_ids).shape == (0, 2)
    assert not_none(batch.select([]).likely).shape == (0, 2)
    assert Batch.of([ONE, trajectory()]).likely is None and Batch.of([FAILED]).likely is None


def test_of_a_group_that_travels_or_waits_in_a_checkpoint(tmp_path: Path) -> None:
    group = PromptGroup(prompt=ONE.prompt, trajectories=[ONE, FAILED, TWO])
    torch.save(group, tmp_path / "state.pt")
    for arrived in (pickle.loads(pickle.dumps(group)), load(tmp_path / "state.pt")):
        first, failed, last = arrived.trajectories
        assert firsts(first.likely) == [7, 9] and firsts(last.likely) == [2] and not len(failed.likely)
    without = PromptGroup(prompt=ONE.prompt, trajectories=[trajectory(), FAILED])
    assert [t.likely for t in pickle.loads(pickle.dumps(without)).trajectories] == [None, None]


def test_of_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    path = journal.write(1, [ONE, FAILED, TWO, trajectory()])
    journal.close()
    first, *others, last = read_journal(not_none(path))
    assert firsts(first.likely) == [7, 9] and firsts(others[1].likely) == [2]
    assert others[0].likely is None and last.likely is None
    old = to_table([ONE], [""]).drop_columns(LIKELY_TOKENS.names)
    assert to_trajectories(old)[0].likely is None
