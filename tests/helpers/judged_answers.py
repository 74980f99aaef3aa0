"""The files of the word problems, with answers that are judged: pairs, single answers and labelled steps."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.tasks import prepare as unjudged
from openrlhf.tasks.prepare import EVAL_SEED, write_rows
from openrlhf.tasks.word_problem import Problem, make_problems, solution, write_answer

PLACEHOLDER = "#"
"""A token of the tiny tokenizer that occurs in no problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles(unjudged.TaskFiles):
    pairs: Path
    """`prompt`, `chosen`, `rejected`: a right answer, and one that guesses or miscalculates."""
    pairs_eval: Path
    """Same columns as `pairs`, with the problems of `eval`."""
    unpaired: Path
    """`input`, `output`, `label`: an answer, and whether it is right."""
    unpaired_eval: Path
    """Same columns as `unpaired`, with the problems of `eval`."""
    steps: Path
    """`input`, `label`: a problem and its steps, each followed by `PLACEHOLDER`, and + or - for each: a step
    after a mistake is wrong too."""
    steps_eval: Path
    """Same columns as `steps`, with the problems of `eval`."""


def prepare(
    folder: str | Path, *, seed: int = 0, num_preferences: int = 2_048, num_eval: int = 256, **sizes: int
) -> TaskFiles:
    """Writes the files of `unjudged.prepare`, and judged answers to its problems beside them."""
    files = unjudged.prepare(folder, seed=seed, num_eval=num_eval, **sizes)
    held_out = make_problems(num_eval, seed=EVAL_SEED)
    questions = frozenset(problem.question for problem in held_out)
    problems = make_problems(num_preferences, seed=seed, exclude=questions)
    judged = _judged(Path(folder), problems, seed=seed)
    return TaskFiles(
        **asdict(files), **judged, **_judged(Path(folder), held_out, seed=EVAL_SEED, suffix="_eval")
    )


def _judged(folder: Path, problems: list[Problem], *, seed: int, suffix: str = "") -> dict[str, Path]:
    rng = random.Random(f"judged/{seed}")
    rows = {
        "pairs": [pair(problem, rng) for problem in problems],
        "unpaired": [unpaired(problem, rng) for problem in problems],
        "steps": [labelled_steps(problem, rng) for problem in problems],
    }
    return {
        f"{name}{suffix}": write_rows(folder / f"{name}{suffix}.jsonl", some) for name, some in rows.items()
    }


def pair(problem: Problem, rng: random.Random) -> dict[str, str]:
    return {
        "prompt": problem.question,
        "chosen": solution(problem, careful=True),
        "rejected": wrong_answer(problem, rng),
    }


def unpaired(problem: Problem, rng: random.Random) -> dict[str, Any]:
    right = rng.random() < 0.5
    answer = solution(problem, careful=True) if right else wrong_answer(problem, rng)
    return {"input": problem.question, "output": answer, "label": right}


def wrong_answer(problem: Problem, rng: random.Random) -> str:
    """Returns a guess, or a careful answer with a mistake in it."""
    steps, _ = mistaken_steps(problem, rng)
    if rng.random() < 0.5:
        return write_answer(steps)
    return f"<think></think>\\boxed{{{steps[-1].partition('=')[2]}}}"


def labelled_steps(problem: Problem, rng: random.Random) -> dict[str, Any]:
    steps, first_wrong = problem.steps, len(problem.steps)
    if rng.random() < 0.5:
        steps, first_wrong = mistaken_steps(problem, rng)
    text = f"{problem.question}\n\n" + " ".join(f"{step}{PLACEHOLDER}" for step in steps)
    return {"input": text, "label": ["+" if i < first_wrong else "-" for i in range(len(steps))]}


def mistaken_steps(problem: Problem, rng: random.Random) -> tuple[tuple[str, ...], int]:
    """Returns the problem's steps with one mistake, and the index of that step. The wrong step adds a number
    from 11 to 39 that is not in the story, and all later steps go on from its result. Every sum is right, the
    final result is wrong."""
    wrong = rng.randrange(len(problem.steps))
    off, steps = 0, list(problem.steps[:wrong])
    for i, step in enumerate(problem.steps[wrong:]):
        start, sign, number, result = _read_step(step)
        if i == 0:
            invented = number + rng.choice((10, 20, 30))
            off = start + invented - result
            steps.append(f"{start}+{invented}={start + invented}")
        else:
            steps.append(f"{start + off}{sign}{number}={result + off}")
    return tuple(steps), wrong


def _read_step(step: str) -> tuple[int, str, int, int]:
    """Parses a step: "49-1=48" -> 49, "-", 1, 48."""
    calculation, _, result = step.partition("=")
    sign = "+" if "+" in calculation else "-"
    start, _, number = calculation.partition(sign)
    return int(start), sign, int(number), int(result)
