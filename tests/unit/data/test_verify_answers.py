"""The check of the tokens that a supervised model learns, and the builder of samples that calls it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from refusals import refused

from openrlhf.data import answers, sft
from openrlhf.data.encode import Text, finish
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.data.store import SampleStore, Tokens
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer

QUESTION, ANSWER = "How many nuts has Leo now?", "  2+3=5\n\\boxed{5}"
PLAIN = {"input": QUESTION, "output": ANSWER}
TALK = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def build(row: dict[str, Any], **options: Any) -> SampleStore:
    usual = {
        "input_key": "input",
        "output_key": "output" if "output" in row else None,
        "apply_chat_template": True,
        "input_template": None,
        "multiturn": False,
        "pretrain": False,
        "max_len": 256,
    }
    return build_sft_samples(Rows.of([row], "rows.json"), tiny_tokenizer(), **(usual | options))


def with_finish(change: Callable[[Tokens], None]) -> AbstractContextManager:
    def changed(tokens: Tokens, eos: int | None) -> None:
        finish(tokens, eos)
        change(tokens)

    return patch.object(sft, "finish", changed)


def forget(place: Callable[[list[bool]], int]) -> Callable[[Tokens], None]:
    def change(tokens: Tokens) -> None:
        tokens[1][place(tokens[1])] = False

    return change


def whole_text(prompt: str, answer: str) -> Text:
    return Text(text=prompt + answer, spans=((0, len(prompt + answer)),))


WRONG: dict[str, tuple[AbstractContextManager, dict[str, Any]]] = {
    "an end without a loss": (with_finish(forget(lambda learned: -1)), {}),
    "a first token without a loss": (with_finish(forget(lambda learned: learned.index(True) + 2)), {}),
    "an answer that is cut": (
        patch.object(answers, "plain_answer", lambda p, a: whole_text(p, a.replace("2+3=5", ""))),
        {"apply_chat_template": False},
    ),
    "a question with a loss": (
        patch.object(answers, "plain_answer", whole_text),
        {"apply_chat_template": False},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_marks_are_found(wrong: str) -> None:
    change, options = WRONG[wrong]
    with change, refused(ErrorCode.BROKEN_INVARIANT, value="rows.json", row=1):
        build(PLAIN, **options)
    with change:
        assert len(build(PLAIN, **options, verify=False)) == 1


def test_thoughts_that_are_cut_are_found() -> None:
    row = PLAIN | {"output": f"<think>2+2=4</think>{ANSWER}"}
    cut = patch.object(answers, "plain_answer", lambda p, a: whole_text("", a.replace("2+2=4", "")))
    with cut, refused(ErrorCode.BROKEN_INVARIANT, value="rows.json", row=1):
        build(row, apply_chat_template=False)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (PLAIN, {}),
        (PLAIN, {"apply_chat_template": False}),
        (PLAIN, {"apply_chat_template": False, "input_template": "Q: {} A:"}),
        ({"input": TALK}, {}),
        ({"input": TALK * 2}, {"multiturn": True}),
        ({"input": [*TALK, TALK[0]]}, {"multiturn": True}),
        ({"input": [*TALK, TALK[0], {"role": "assistant", "content": ""}]}, {"multiturn": True}),
        ({"input": QUESTION, "output": [TALK[1]]}, {}),
        ({"input": QUESTION, "output": f"<think>2+2=4</think>{ANSWER}"}, {}),
        ({"input": QUESTION, "output": QUESTION}, {}),  # an answer that repeats the question
        ({"input": QUESTION, "output": "\u65e5\u672c \U0001f600 na\u00efve"}, {}),
    ],
    ids=str,
)
def test_right_marks_pass(row: dict[str, Any], options: dict[str, Any]) -> None:
    assert len(build(row, **options)) == 1


def test_truncated_samples_are_not_checked() -> None:
    row = {"input": QUESTION, "output": "word " * 300}
    assert len(build(row)) == 1
    with with_finish(forget(lambda learned: learned.index(True) + 2)):
        assert len(build(row)) == 1
