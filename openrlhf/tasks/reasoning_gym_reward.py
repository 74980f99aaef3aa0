"""The reward of reasoning_gym's problems: its own verifier, asked about the answer that a response gives."""

import re

from openrlhf.data.reasoning_gym import entry_of
from openrlhf.rewards.math import extract_boxed_answer

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_END = re.compile(r"(?:\s|<[|｜][^<>\s]*[|｜]>|</s>|<eos>|<pad>|<end_of_turn>|<\|?im_end\|?>)+\Z")
"""Blanks and the special tokens that end a response."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """The verifier's score, from 0 to 1, and as an extra log whether the answer was marked. What the verifier
    raises, as a few do on texts that they cannot read, is a failed reward."""
    scores, marked = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer, is_marked = extract_answer(query.removeprefix(prompt))
        dataset, entry = entry_of(label)
        scores.append(float(dataset.score_answer(answer, entry)))
        marked.append(float(is_marked))
    return {"rewards": scores, "scores": scores, "extra_logs": {"answer_marked": marked}}


def extract_answer(response: str) -> tuple[str | None, bool]:
    """(answer, whether it is marked): the inside of the last <answer>...</answer>, else that of the last
    \\boxed{...}, else the last line that is not blank, after the thoughts and without special tokens."""
    said = response.rpartition("</think>")[2]
    if tagged := _TAGGED.findall(said):
        return tagged[-1].strip(), True
    if (boxed := extract_boxed_answer(said)) is not None:
        return boxed, True
    lines = _END.sub("", said).strip().splitlines()
    return (lines[-1].strip() if lines else None), False
