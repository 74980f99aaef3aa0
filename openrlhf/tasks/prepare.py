"""Writes everything that a run on the word problems needs into one folder."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.api import DEVICE_TYPE as DEVICE_TYPE  # before anything that imports transformers
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.word_problem import Problem, make_problems, solution, worked_problem

REWARD_FILE = Path(__file__).with_name("word_problem_reward.py")
FINAL_ANSWER_REWARD = Path(__file__).with_name("final_answer_reward.py")


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
    reward: Path = REWARD_FILE
    """Reward file for --reward.remote_url."""


def prepare(
    folder: str | Path,
    *,
    seed: int = 0,
    num_pretrain: int = 20_000,
    num_sft: int = 3_200,
    num_prompts: int = 2_048,
    num_eval: int = 256,
    careful_fraction: float = 0.4,
) -> TaskFiles:
    """Writes the files of the task; equal arguments give equal files. The evaluation problems are the same
    for every seed, so that runs can be compared."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = make_problems(num_eval, seed=EVAL_SEED)
    questions = frozenset(problem.question for problem in held_out)
    problems = make_problems(max(num_pretrain, num_sft, num_prompts), seed=seed, exclude=questions)
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
    )


def demonstration(problem: Problem, *, careful: bool) -> dict[str, str]:
    return {"input": problem.question, "output": solution(problem, careful=careful)}


def labelled(problem: Problem) -> dict[str, str]:
    return {"input": problem.question, "label": problem.answer}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


EVAL_SEED = 1_000_003
