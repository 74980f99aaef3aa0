"""Answers to mathematical problems: finding them in a text, and comparing them."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WORD = re.compile(r"[^\s$]+")


def extract_boxed_answer(text: str) -> str | None:
    r"""What the last complete \boxed{...} or \fbox{...} of a text holds, or the word after \boxed. None where
    there is no such answer."""
    for box in reversed(list(_BOX.finditer(text))):
        answer = _braced(text, box.end()) if text[box.end() :].startswith("{") else _word(text, box.end())
        if answer is not None:
            return answer
    return None


def grade_answer(prediction: str | None, truth: str) -> bool:
    """Whether two answers say the same: the same text but for blanks, or equal as numbers, formulas, sets or
    intervals, in LaTeX or plain, as math-verify reads them. No prediction is wrong.

    math-verify limits its time by a signal, so this must run in the main thread of its process, as reward
    functions do.
    """
    if prediction is None:
        return False
    if "".join(prediction.split()) == "".join(truth.split()):
        return True
    from math_verify import parse, verify  # sympy takes a second

    gold, answer = (parse(f"\\boxed{{{side}}}") for side in (truth, prediction))
    return bool(verify(gold, answer))


def _braced(text: str, start: int) -> str | None:
    """The inside of the braces that open at `start`; None where they do not close."""
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
