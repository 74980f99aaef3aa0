"""Tasks of the table: their problems and their rewards."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from openrlhf.data.reasoning_gym import gym_rows
from openrlhf.tasks import final_answer_reward, word_problem_reward
from openrlhf.tasks.prepare import EVAL_SEED, labelled, write_rows
from openrlhf.tasks.word_problem import make_problems

Row = dict[str, Any]
"""A problem: `input` (text or messages) and `label`."""
Reward = Callable[[list[str], list[str], list[Any]], Any]
HELD_OUT, TRAINED, DEMONSTRATIONS = 256, 2_048, 24_000
"""Numbers of problems for evaluation, for RL, and for a model that learns from answers first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    about: str
    problems: Callable[[int], Iterator[Row]]
    """Yields problems without end. Argument: the seed."""
    reward: Reward
    max_new_tokens: int
    max_len: int = 256
    goal: float = 0.9
    """Fraction of solved samples of a step that counts as the goal."""
    flags: dict[str, Any] = field(default_factory=dict)
    demonstration: Callable[[Row, random.Random], Row] | None = None
    """Function from a problem to the row, `input` and `output`, from which the tiny model learns before RL.
    None: its first phases were about this task."""

    def split(self, seed: int) -> tuple[list[Row], list[Row]]:
        """Returns the problems for RL, and the held-out ones, which are the same for every seed and whose
        text no other problem has."""
        held_out = list(islice(self.problems(EVAL_SEED), HELD_OUT))
        texts = {str(row["input"]) for row in held_out}
        free = (row for row in self.problems(seed) if str(row["input"]) not in texts)
        return list(islice(free, TRAINED)), held_out

    def write(self, folder: Path, seed: int) -> None:
        """Writes `prompts.jsonl` and `eval.jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        problems, held_out = self.split(seed)
        write_rows(folder / "prompts.jsonl", problems)
        write_rows(folder / "eval.jsonl", held_out)

    def write_demonstrations(self, file: Path, seed: int) -> None:
        """Writes answers to DEMONSTRATIONS problems that are not held out."""
        assert self.demonstration is not None
        texts = {str(row["input"]) for row in self.split(seed)[1]}
        rng = random.Random(f"demonstrations/{seed}")
        free = (row for row in self.problems(seed) if str(row["input"]) not in texts)
        write_rows(file, (self.demonstration(row, rng) for row in islice(free, DEMONSTRATIONS)))


def words(seed: int) -> Iterator[Row]:
    yield from map(labelled, make_problems(2 * TRAINED, seed=seed))


def gym(setting: str, seed: int) -> Iterator[Row]:
    """Problems of reasoning-gym. `setting`: a dataset with its parameters, as `chain_sum?max_terms=3`."""
    name, _, parameters = setting.partition("?")
    start = seed if seed == EVAL_SEED else 100_000 * (seed + 1)
    text = f"reasoning_gym:{name}?size={16 * TRAINED}&seed={start}"
    yield from gym_rows(f"{text}&{parameters}" if parameters else text, "task")


def sums(seed: int) -> Iterator[Row]:
    for row in gym("chain_sum?min_terms=2&max_terms=4&min_digits=1&max_digits=1", seed):
        yield {"input": row["input"], "label": worked(row["input"])[1]}


def worked(question: str) -> tuple[list[str], str]:
    """Returns the steps of a sum such as "3 - 4 + 2 =", here 3-4=-1 and -1+2=1, and its value."""
    first, *terms = re.findall(r"[-+]?\d+", question.replace(" ", ""))
    total, steps = int(first), []
    for term in terms:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return steps, str(total)


def demonstrated_sum(row: Row, rng: random.Random) -> Row:
    """Shows the steps in as many answers as the demo's demonstrations do."""
    steps, total = worked(row["input"])
    thought = "; ".join(steps) if rng.random() < 0.4 else ""
    return {"input": row["input"], "output": f"<think>{thought}</think>\\boxed{{{total}}}"}


TASKS = {
    "words": Task(
        about="the demo's word problems: two to four small sums told as a story",
        problems=words,
        reward=word_problem_reward.reward_func,
        max_new_tokens=48,
        max_len=128,
    ),
    "sums": Task(
        about="reasoning-gym's chain_sum: two to four numbers of one digit",
        problems=sums,
        reward=word_problem_reward.reward_func,
        max_new_tokens=48,
        max_len=128,
        demonstration=demonstrated_sum,
    ),
    "chain_sum": Task(
        about="reasoning-gym's chain_sum: two or three numbers of one digit",
        problems=partial(gym, "chain_sum?max_terms=3&max_digits=1"),
        reward=final_answer_reward.reward_func,
        max_new_tokens=24,
        goal=0.5,
        flags={"rollout.temperature": 0.7},
    ),
    "gsm_symbolic": Task(
        about="reasoning-gym's gsm_symbolic: grade-school word problems",
        problems=partial(gym, "gsm_symbolic"),
        reward=final_answer_reward.reward_func,
        max_new_tokens=128,
        max_len=512,
        goal=0.2,
        flags={"rollout.temperature": 0.7},
    ),
}
