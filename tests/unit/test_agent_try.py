"""Printed output of `openrlhf agent try` for episodes."""

import io
from itertools import chain

from records import trajectory
from rich.console import Console

from openrlhf.cli.agent import print_episode
from openrlhf.tasks.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def printed(*parts) -> str:
    out = io.StringIO()
    print_episode(Console(file=out, width=200), TOKENIZER, 3, parts)
    return out.getvalue()


def test_turn_by_turn() -> None:
    texts = ["1 + 1 =", " 3", " Wrong:", " 2"]
    ids = [tokens(text) for text in texts]
    mask = [k % 2 == 1 for k, part in enumerate(ids) for _ in part]
    t = trajectory(
        0.75,
        token_ids=list(chain(*ids)),
        action_mask=mask,
        rollout_log_probs=[-1.0] * len(ids[1]) + [-2.0] * len(ids[3]),
        turn_rewards=[-0.25, 1.0],
        extra_logs={"tries": 2.0},
    )
    lines = printed(t).splitlines()
    assert lines[1:] == [
        "episode 3: ok, reward 0.75",
        "tries 2",
        f"{len(ids[0])} tokens read, not trained on",
        "1 + 1 =",
        f"turn 1: {len(ids[1])} tokens sampled, log-prob -1.00 each, earned -0.25",
        " 3",
        f"{len(ids[2])} tokens read, not trained on",
        " Wrong:",
        f"turn 2: {len(ids[3])} tokens sampled, log-prob -2.00 each, earned 1",
        " 2",
        "the token stream holds: one sequence",
    ]


def test_a_rewritten_history_is_shown() -> None:
    """The output shows the error of a failed episode too."""
    begin = tokens("Tom has 3")

    def part(number: int, text: str):
        ids = [*begin, *tokens(text)]
        mask = [i + 1 == len(ids) for i in range(len(ids))]
        return trajectory(1.0, token_ids=ids, action_mask=mask, part=number)

    text = printed(part(0, " apples and 4"), part(1, " pears and 5"))
    assert f"After {len(begin)} equal tokens the stream had ' apples and 4'" in text
    assert "the agent asked with ' pears and 5'" in text
    assert "the token stream holds" not in text
    assert "line 3: KeyError" in printed(trajectory(None, error="agent.py: line 3: KeyError: 'x'"))


def test_several_answers_to_one_request_are_no_rewritten_history() -> None:
    """A request with n: 2 leaves two sequences that begin with the same prompt. Their answers begin alike."""
    prompt = tokens("Tom has 3")

    def part(number: int, answer: str):
        ids = [*prompt, *tokens(answer)]
        mask = [i >= len(prompt) for i in range(len(ids))]
        logs = [-1.0] * (len(ids) - len(prompt))
        return trajectory(1.0, token_ids=ids, action_mask=mask, rollout_log_probs=logs, part=number)

    text = printed(part(0, " apples and 4"), part(1, " apples and 5"), part(2, " apples and 5"))
    assert text.count(f"another answer to the same {len(prompt)} tokens") == 2
    assert "with n" in text and "rewritten" not in text


def test_a_rewritten_history_is_compared_with_the_sequence_nearest_to_it() -> None:
    begin = tokens("Tom has 3")

    def part(number: int, text: str):
        ids = [*begin, *tokens(text)]
        return trajectory(
            1.0, token_ids=ids, action_mask=[i + 1 == len(ids) for i in range(len(ids))], part=number
        )

    text = printed(part(0, " pears and 5"), part(1, " apples and 4"), part(2, " apples or 4"))
    shared = len(begin) + len(tokens(" apples"))
    assert f"After {shared} equal tokens the stream had ' and 4', the agent asked with ' or 4'" in text
