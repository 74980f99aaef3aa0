"""Extracts and compares answers to mathematical problems."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WORD = re.compile(r"[^\s$]+")


def extract_boxed_answer(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...} or \fbox{...} in a text, or the word after
    \boxed. None without such an answer."""
    for box in reversed(list(_BOX.finditer(text))):
        answer = _braced(text, box.end()) if text[box.end() :].startswith("{") else _word(text, box.end())
        if answer is not None:
            return answer
    return None


def grade_answer(prediction: str | None, truth: str) -> bool:
    """Returns True if two answers are equal: the same text apart from whitespace, or, according to
    math-verify, equal numbers, formulas, sets or intervals, in LaTeX or plain text. A missing prediction is
    wrong.

    math-verify enforces its time limit by a signal, so call this in the main thread of a process. Reward
    functions run there.
    """
    if prediction is None:
        return False
    if "".join(prediction.split()) == "".join(truth.split()):
        return True
    from math_verify import parse, verify  # imports sympy, which takes a second

    gold, answer = (parse(f"\\boxed{{{side}}}") for side in (truth, prediction))
    return bool(verify(gold, answer))


def _braced(text: str, start: int) -> str | None:
    """Returns the content of the braces that open at `start`; None if they do not close."""
    depth = 0
    for i in range(start, len(text)):
        if text[i - 1] == "\\" and i > start:
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i].strip()
    return None


def _word(text: str, start: int) -> str | None:
    found = _WORD.match(text, start)
    return found.group() if found else None
