"""Reward of reasoning_gym's problems: the score of its own verifier for the answer in a response."""

import re

from openrlhf.api import behind_thoughts, extract_boxed_answer, find_entry

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_END = re.compile(r"(?:\s|<[|｜][^<>\s]*[|｜]>|</s>|<eos>|<pad>|<end_of_turn>|<\|?im_end\|?>)+\Z")
"""Whitespace and special tokens that end a response."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """Returns the verifier's score, from 0 to 1, and as an extra log whether the answer was marked. An
    exception of the verifier, which a few raise for unreadable texts, is a failed reward."""
    scores, marked = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer, is_marked = extract_answer(query.removeprefix(prompt))
        dataset, entry = find_entry(label)
        scores.append(float(dataset.score_answer(answer, entry)))
        marked.append(float(is_marked))
    return {"rewards": scores, "scores": scores, "extra_logs": {"answer_marked": marked}}


def extract_answer(response: str) -> tuple[str | None, bool]:
    r"""Returns (answer, whether it is marked): the content of the last <answer>...</answer>, else of the last
    \boxed{...}, else the last non-blank line, after the thoughts and without special tokens."""
    said = behind_thoughts(response)
    if tagged := _TAGGED.findall(said):
        return tagged[-1].strip(), True
    if (boxed := extract_boxed_answer(said)) is not None:
        return boxed, True
    lines = _END.sub("", said).strip().splitlines()
    return (lines[-1].strip() if lines else None), False
