"""Tasks of the table: their problems and their rewards."""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from openrlhf.data.reasoning_gym import gym_rows
from openrlhf.tasks import final_answer_reward, word_problem_reward
from openrlhf.tasks.prepare import EVAL_SEED, labelled, write_rows
from openrlhf.tasks.word_problem import boxed_answer, make_problems
from reproducible import guess

Row = dict[str, Any]
"""A problem: `input` (text or messages) and `label`."""
Reward = Callable[[list[str], list[str], list[Any]], Any]
HELD_OUT, TRAINED, DEMONSTRATIONS = 256, 2_048, 24_000
"""Numbers of problems for evaluation, for RL, and of answers for a model that learns from answers first."""
CAREFUL = 0.4
"""Fraction of the answers to learn from that are careful, as in the demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    about: str
    problems: Callable[[int], Iterator[Row]]
    """Yields problems without end. Argument: the seed."""
    reward: Reward | None
    """None: the task is an environment that `flags` name, and rewards its own episodes."""
    max_new_tokens: int
    max_len: int = 256
    goal: float = 0.9
    """Fraction of solved samples of a step that counts as the goal."""
    flags: dict[str, Any] = field(default_factory=dict)
    demonstrate: Callable[[Row, random.Random], Iterable[Row]] | None = None
    """Function from a problem to the rows, `input` and `output`, from which the tiny model learns before RL.
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
        """Writes DEMONSTRATIONS answers to problems that are not held out."""
        assert self.demonstrate is not None
        texts = {str(row["input"]) for row in self.split(seed)[1]}
        rng = random.Random(f"demonstrations/{seed}")
        free = (row for row in self.problems(seed) if str(row["input"]) not in texts)
        answers = chain.from_iterable(self.demonstrate(row, rng) for row in free)
        write_rows(file, islice(answers, DEMONSTRATIONS))


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


def demonstrate_sum(row: Row, rng: random.Random) -> Iterable[Row]:
    yield answer(row, *worked(row["input"]), rng)


def answer(row: Row, steps: list[str], result: str, rng: random.Random) -> Row:
    """Shows the steps in as many answers as the demo's demonstrations do."""
    thought = "; ".join(steps) if rng.random() < CAREFUL else ""
    return {"input": row["input"], "output": f"<think>{thought}</think>\\boxed{{{result}}}"}


def countdown(seed: int) -> Iterator[Row]:
    """Problems like those of reasoning-gym's countdown, whose own generator needs a tenth of a second for
    each."""
    rng = random.Random(f"countdown/{seed}")
    while True:
        numbers = [rng.randint(1, 9) for _ in range(3)]
        target = numbers[0] + sum(rng.choice((1, -1)) * number for number in numbers[1:])
        rng.shuffle(numbers)
        if target > 0:
            question = f"Make {target} of {', '.join(map(str, numbers))}."
            yield {"input": question, "label": [target, *sorted(numbers)]}


def countdown_reward(queries: list[str], prompts: list[str], labels: list[list[int]]) -> list[float]:
    """Returns 1 for a boxed sum of all numbers that is the target, else 0."""
    found = (reached(boxed_answer(query)) for query in queries)
    return [float(one == label) for one, label in zip(found, labels, strict=True)]


def reached(terms: str | None) -> list[int]:
    """Returns the value of terms such as "3+7-2" and their numbers in order; nothing for another text."""
    if terms is None or not re.fullmatch(r"\d([-+]\d)*", terms):
        return []
    return [sum(map(int, re.findall(r"[-+]?\d", terms))), *sorted(map(int, re.findall(r"\d", terms)))]


def search(question: str) -> tuple[list[str], str]:
    """Returns the sums that a search for the target tries, the last one of which is right, and its terms."""
    target, *numbers = map(int, re.findall(r"\d+", question))
    a, b, c = numbers
    tried = []
    for terms in (
        f"{a}+{b}+{c}", f"{a}+{b}-{c}", f"{a}-{b}+{c}", f"{b}-{a}+{c}",
        f"{a}-{b}-{c}", f"{b}-{a}-{c}", f"{c}-{a}-{b}",
    ):  # fmt: skip
        tried.append(f"{terms}={reached(terms)[0]}")
        if reached(terms)[0] == target:
            return tried, terms
    raise ValueError(f"{question!r} has no solution")


def demonstrate_search(row: Row, rng: random.Random) -> Iterable[Row]:
    yield answer(row, *search(row["input"]), rng)


def spelling(seed: int) -> Iterator[Row]:
    """Problems of spell_backward with letters apart, because the tiny model's tokens are parts of words."""
    for row in gym("spell_backward?min_word_len=3&max_word_len=6", seed):
        word = row["input"].rpartition(": ")[2].lower()
        yield {"input": f"Spell {'-'.join(word)} backward.", "label": "-".join(reversed(word))}


def spelling_reward(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Returns 1 for a boxed word that is the label, else 0."""
    return [float(boxed_answer(query) == label) for query, label in zip(queries, labels, strict=True)]


def demonstrate_spelling(row: Row, rng: random.Random) -> Iterable[Row]:
    letters = row["label"].split("-")[::-1]
    steps: list[str] = ["-".join(reversed(letters[: i + 1])) for i in range(len(letters))]
    yield answer(row, steps, row["label"], rng)


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
        demonstrate=demonstrate_sum,
    ),
    "countdown": Task(
        about="countdown: adding and subtracting three numbers of one digit to a target",
        problems=countdown,
        reward=countdown_reward,
        max_new_tokens=96,
        max_len=160,
        demonstrate=demonstrate_search,
    ),
    "spelling": Task(
        about="reasoning-gym's spell_backward: words of three to six letters, set apart by hyphens",
        problems=spelling,
        reward=spelling_reward,
        max_new_tokens=72,
        max_len=128,
        demonstrate=demonstrate_spelling,
    ),
    "guess": Task(
        about=f"a game: finding a number from 1 to {guess.Game.highest} by {guess.Game.max_tries} guesses",
        problems=guess.rows,
        reward=None,
        max_new_tokens=12,
        demonstrate=partial(guess.play, careful=CAREFUL),
        flags={"train.agent_func_path": guess.__file__, "data.apply_chat_template": False},
    ),
    "chain_sum": Task(
        about="reasoning-gym's chain_sum: two or three numbers of one digit",
        problems=partial(gym, "chain_sum?max_terms=3&max_digits=1"),
        reward=final_answer_reward.reward_func,
        max_new_tokens=24,
        goal=0.5,
        flags={"rollout.temperature": 0.7},
    ),
}
