r"""A task that a tiny model learns in a minute: chains of small sums told as a story.

    Sam has 49 limes, drops 1, sells 9 and sells 7. How many limes now?
    <think>49-1=48; 48-9=39; 39-7=32</think>\boxed{32}

A careful answer writes every step down, a hasty one leaves <think></think> empty. A small model that thinks
is right nearly always, one that does not is right rarely. So a policy that starts from both kinds of answers,
and is rewarded for the boxed number alone, discovers that thinking pays: length and accuracy rise together.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    question: str
    steps: tuple[str, ...]
    """Calculations such as "49-1=48", one for each event."""
    answer: str


def make_problem(rng: random.Random) -> Problem:
    """Makes a problem with two to four events and at most 99 items."""
    name, items = rng.choice(_NAMES), rng.choice(_ITEMS)
    start = count = rng.randint(1, 49)
    events, steps = [], []
    for _ in range(rng.randint(2, 4)):
        sign, number = _change(rng, count)
        after = count + number if sign == "+" else count - number
        events.append(f"{rng.choice(_VERBS[sign])} {number}")
        steps.append(f"{count}{sign}{number}={after}")
        count = after
    story = f"{', '.join(events[:-1])} and {events[-1]}"
    question = f"{name} has {start} {items}, {story}. How many {items} now?"
    return Problem(question=question, steps=tuple(steps), answer=str(count))


def make_problems(count: int, *, seed: int, exclude: frozenset[str] = frozenset()) -> list[Problem]:
    """Returns `count` problems with different questions, none of them in `exclude`."""
    rng = random.Random(f"word_problem/{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng)
        if problem.question not in exclude:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def solution(problem: Problem, *, careful: bool) -> str:
    return write_answer(problem.steps) if careful else f"<think></think>\\boxed{{{problem.answer}}}"


def write_answer(steps: Sequence[str]) -> str:
    """Returns the careful answer that follows from these steps."""
    thought, result = "; ".join(steps), steps[-1].partition("=")[2]
    return f"<think>{thought}</think>\\boxed{{{result}}}"


def worked_problem(problem: Problem) -> str:
    """Returns question and careful answer as plain text, separated by as many tokens as in the tiny model's
    chat template: distances that a small model learns in plain text then hold in a chat."""
    return f"{problem.question}\n\n{solution(problem, careful=True)}"


def boxed_answer(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} of a text, or None."""
    found = _BOXED.findall(text)
    return found[-1] if found else None


def thinks(text: str) -> bool:
    """Returns whether at least one step is written down."""
    return "=" in text.partition("<think>")[2].partition("</think>")[0]


def _change(rng: random.Random, count: int) -> tuple[str, int]:
    """Returns a sign and a number from 1 to 9 that keep the count between 0 and 99."""
    while True:
        sign, number = rng.choice("+-"), rng.randint(1, 9)
        if 0 <= (count + number if sign == "+" else count - number) <= 99:
            return sign, number


_NAMES = ("Tom", "Ana", "Ben", "Eva", "Sam", "Mia", "Leo", "Zoe", "Max", "Amy")
_ITEMS = ("apples", "plums", "pears", "nuts", "cakes", "grapes", "figs", "limes")
_VERBS = {"+": ("buys", "finds", "wins", "gets"), "-": ("loses", "sells", "drops", "eats")}
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
