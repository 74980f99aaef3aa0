"""Writes everything that a run on the word problems needs into one folder."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf import device as device  # before anything that imports transformers
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.word_problem import (
    Problem,
    answer_of,
    make_problems,
    mistaken_steps,
    solution,
    worked_problem,
)

PLACEHOLDER = "#"
"""A token of the tiny tokenizer that occurs in no problem."""

REWARD_FILE = Path(__file__).with_name("word_problem_reward.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    model: Path
    """Untrained weights and the tokenizer."""
    pretrain: Path
    """`input`: a problem and its careful answer as plain text."""
    sft: Path
    """`input`, `output`: a problem, and a careful or a hasty answer."""
    prompts: Path
    """`input`, `label`: a problem and its number."""
    eval: Path
    """Same columns as `prompts`; none of these problems is in another file."""
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
    reward: Path = REWARD_FILE
    """Reward file for --reward.remote_url."""


def prepare(
    folder: str | Path,
    *,
    seed: int = 0,
    num_pretrain: int = 20_000,
    num_sft: int = 3_200,
    num_prompts: int = 2_048,
    num_preferences: int = 2_048,
    num_eval: int = 256,
    careful_fraction: float = 0.4,
) -> TaskFiles:
    """Writes the files of the task; equal arguments give equal files. The evaluation problems are the same
    for every seed, so that runs can be compared."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = make_problems(num_eval, seed=_EVAL_SEED)
    questions = frozenset(problem.question for problem in held_out)
    problems = make_problems(
        max(num_pretrain, num_sft, num_prompts, num_preferences), seed=seed, exclude=questions
    )
    rng = random.Random(f"prepare/{seed}")
    return TaskFiles(
        model=tiny_chat_model(folder / "model", seed=seed),
        pretrain=write_rows(
            folder / "pretrain.jsonl",
            ({"input": worked_problem(problem)} for problem in problems[:num_pretrain]),
        ),
        sft=write_rows(
            folder / "sft.jsonl",
            (
                demonstration(problem, careful=rng.random() < careful_fraction)
                for problem in problems[:num_sft]
            ),
        ),
        prompts=write_rows(folder / "prompts.jsonl", map(labelled, problems[:num_prompts])),
        eval=write_rows(folder / "eval.jsonl", map(labelled, held_out)),
        **_preference_files(folder, problems[:num_preferences], seed=seed),
        **_preference_files(folder, held_out, seed=_EVAL_SEED, suffix="_eval"),
    )


def _preference_files(
    folder: Path, problems: list[Problem], *, seed: int, suffix: str = ""
) -> dict[str, Path]:
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
        return answer_of(steps)
    return f"<think></think>\\boxed{{{steps[-1].partition('=')[2]}}}"


def labelled_steps(problem: Problem, rng: random.Random) -> dict[str, Any]:
    steps, first_wrong = problem.steps, len(problem.steps)
    if rng.random() < 0.5:
        steps, first_wrong = mistaken_steps(problem, rng)
    text = f"{problem.question}\n\n" + " ".join(f"{step}{PLACEHOLDER}" for step in steps)
    return {"input": text, "label": ["+" if i < first_wrong else "-" for i in range(len(steps))]}


def demonstration(problem: Problem, *, careful: bool) -> dict[str, str]:
    return {"input": problem.question, "output": solution(problem, careful=careful)}


def labelled(problem: Problem) -> dict[str, str]:
    return {"input": problem.question, "label": problem.answer}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_EVAL_SEED = 1_000_003
