"""Tasks of the table: their problems and their rewards."""

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
HELD_OUT, TRAINED = 256, 2_048
"""Numbers of problems for evaluation and for RL."""


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


def words(seed: int) -> Iterator[Row]:
    yield from map(labelled, make_problems(2 * TRAINED, seed=seed))


def gym(setting: str, seed: int) -> Iterator[Row]:
    """Problems of reasoning-gym. `setting`: a dataset with its parameters, as `chain_sum?max_terms=3`."""
    name, _, parameters = setting.partition("?")
    start = seed if seed == EVAL_SEED else 100_000 * (seed + 1)
    text = f"reasoning_gym:{name}?size={8 * TRAINED}&seed={start}"
    yield from gym_rows(f"{text}&{parameters}" if parameters else text, "task")


TASKS = {
    "words": Task(
        about="the demo's word problems: two to four small sums told as a story",
        problems=words,
        reward=word_problem_reward.reward_func,
        max_new_tokens=48,
        max_len=128,
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
