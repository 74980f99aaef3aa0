"""Tasks of the table: their problems, their rewards, and what the tiny model reads before RL.

The tiny model is the demo's, after its first phase. It learns the form of a task's answers from
demonstrations of which only a part is right, as the demo's second phase does on word problems; RL does the
rest.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from openrlhf.data.reasoning_gym import find_entry, gym_rows
from openrlhf.tasks import final_answer_reward, reasoning_gym_reward, word_problem_reward
from openrlhf.tasks.prepare import EVAL_SEED, labelled, write_rows
from openrlhf.tasks.word_problem import make_problems
from reproducible.guess_number import GuessNumber

Row = dict[str, Any]
"""A problem: `input` (text or messages) and `label`."""
Reward = Callable[[list[str], list[str], list[Any]], Any]
HELD_OUT, TRAINED, DEMONSTRATED = 256, 2_048, 3_200
"""Numbers of problems: for evaluation, for RL, and for the demonstrations of the tiny model."""
RIGHT = 0.4
"""Fraction of right demonstrations."""
AGENT = Path(__file__).with_name("guess_number.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    about: str
    problems: Callable[[int], Iterator[Row]]
    """Yields problems without end. Argument: the seed."""
    reward: Reward | None
    """None: the agent gives the reward."""
    max_new_tokens: int
    """Longest answer, or longest turn of an agent."""
    max_len: int = 256
    goal: float = 0.9
    """Fraction of solved samples of a step that counts as the goal."""
    wrong: Callable[[Row, random.Random], str] | None = None
    """Returns a wrong answer of the right form; None if the tiny model has no demonstrations of this kind."""
    repeats: bool = False
    """True if equal problems differ in their seed alone, so that none is held out by its text."""
    flags: dict[str, Any] = field(default_factory=dict)

    def split(self, seed: int) -> tuple[list[Row], list[Row]]:
        """Returns the problems for RL, and the held-out ones, which are the same for every seed and whose
        text no other problem has."""
        held_out = list(islice(self.problems(EVAL_SEED), HELD_OUT))
        texts = {str(row["input"]) for row in held_out}
        free = (row for row in self.problems(seed) if self.repeats or str(row["input"]) not in texts)
        return list(islice(free, max(TRAINED, DEMONSTRATED))), held_out

    def write(self, folder: Path, seed: int) -> None:
        """Writes `prompts.jsonl` and `eval.jsonl`, and `demonstrations.jsonl` if there are any."""
        folder.mkdir(parents=True, exist_ok=True)
        problems, held_out = self.split(seed)
        write_rows(folder / "prompts.jsonl", problems[:TRAINED])
        write_rows(folder / "eval.jsonl", held_out)
        rng = random.Random(f"demonstrations/{seed}")
        if self.reward is None:
            write_rows(folder / "demonstrations.jsonl", islice(random_games(rng), DEMONSTRATED))
        elif self.wrong:
            shown = (demonstration(row, self.wrong, rng) for row in problems[:DEMONSTRATED])
            write_rows(folder / "demonstrations.jsonl", shown)


def demonstration(row: Row, wrong: Callable[[Row, random.Random], str], rng: random.Random) -> Row:
    answer = right_answer(row) if rng.random() < RIGHT else wrong(row, rng)
    return {"input": row["input"], "output": answer}


def right_answer(row: Row) -> str:
    """Returns a right answer: the label, or that of reasoning-gym's problem."""
    return find_entry(row["label"])[1]["answer"] if "datasource" in row else row["label"]


def words(seed: int) -> Iterator[Row]:
    yield from map(labelled, make_problems(2 * TRAINED + DEMONSTRATED, seed=seed))


def sums(seed: int) -> Iterator[Row]:
    """The addition task of the tinker cookbook: two numbers from 0 to 100, after one example."""
    rng = random.Random(f"sums/{seed}")
    while True:
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        said = ("user", "What is 4 + 5?"), ("assistant", "9"), ("user", f"What is {x} + {y}?")
        yield {"input": [{"role": role, "content": text} for role, text in said], "label": str(x + y)}


def games(size: str, seed: int) -> Iterator[Row]:
    for i in range(1 << 30):
        yield {"input": size, "label": seed * 10_000 + i}


def gym(setting: str, seed: int) -> Iterator[Row]:
    """Problems of reasoning-gym. `setting`: a dataset with its parameters, as `chain_sum?max_terms=3`."""
    name, _, parameters = setting.partition("?")
    start = seed if seed == EVAL_SEED else 100_000 * (seed + 1)
    text = f"reasoning_gym:{name}?size={2 * (TRAINED + DEMONSTRATED)}&seed={start}"
    yield from gym_rows(f"{text}&{parameters}" if parameters else text, "task")


def wrong_number(row: Row, rng: random.Random) -> str:
    return str(int(right_answer(row)) + rng.choice((-10, -2, -1, 1, 2, 10)))


def wrong_word(row: Row, rng: random.Random) -> str:
    """Returns the word backward with two neighbours exchanged."""
    letters = list(right_answer(row))
    i = rng.randrange(len(letters) - 1)
    letters[i : i + 2] = letters[i + 1], letters[i]
    return "".join(letters)


def wrong_expression(row: Row, rng: random.Random) -> str:
    numbers = list(find_entry(row["label"])[1]["metadata"]["numbers"])
    rng.shuffle(numbers)
    first, *others = numbers
    return str(first) + "".join(f" {rng.choice('+-*')} {number}" for number in others)


def random_games(rng: random.Random, highest: int = 8, tries: int = 4) -> Iterator[Row]:
    """Yields the turns of a player who guesses at random."""
    while True:
        game, messages, is_over = GuessNumber(highest, tries), [], False
        told, _ = game.reset(seed=rng.getrandbits(32))
        while not is_over:
            messages = [*messages, {"role": "user", "content": told}]
            guess = str(rng.randint(1, highest))
            yield {"input": messages, "output": guess}
            messages = [*messages, {"role": "assistant", "content": guess}]
            told, _, is_found, is_last, _ = game.step(guess)
            is_over = is_found or is_last


def sum_reward(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> list[float]:
    """Returns 1 for an answer that begins with the right number, else 0."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    found: Iterable[re.Match | None] = map(_FIRST_NUMBER.match, answers)
    return [
        float(match is not None and match[1] == label) for match, label in zip(found, labels, strict=True)
    ]


_FIRST_NUMBER = re.compile(r"\s*(-?\d+)(?![.,]?\d)")

TASKS = {
    "words": Task(
        about="the demo's word problems: two to four small sums told as a story",
        problems=words,
        reward=word_problem_reward.reward_func,
        max_new_tokens=48,
        max_len=128,
    ),
    "arithmetic": Task(
        about="the addition task of the tinker cookbook: two numbers from 0 to 100, after one example",
        problems=sums,
        reward=sum_reward,
        max_new_tokens=8,
        wrong=wrong_number,
    ),
    "chain_sum": Task(
        about="reasoning-gym's chain_sum: two or three numbers of one digit",
        problems=partial(gym, "chain_sum?max_terms=3&max_digits=1"),
        reward=reasoning_gym_reward.reward_func,
        max_new_tokens=8,
        wrong=wrong_number,
    ),
    "chain_sum_said": Task(
        about="the sums of chain_sum; the last number of an answer counts",
        problems=partial(gym, "chain_sum?max_terms=3&max_digits=1"),
        reward=final_answer_reward.reward_func,
        max_new_tokens=24,
        goal=0.5,
        flags={"rollout.temperature": 0.7},
    ),
    "spell_backward": Task(
        about="reasoning-gym's spell_backward: words of three to five letters",
        problems=partial(gym, "spell_backward?min_word_len=3&max_word_len=5"),
        reward=reasoning_gym_reward.reward_func,
        max_new_tokens=16,
        wrong=wrong_word,
        goal=0.5,
    ),
    "countdown": Task(
        about="reasoning-gym's countdown with three numbers from 1 to 20",
        problems=partial(
            gym, "countdown?min_numbers=3&max_numbers=3&max_value=20&min_target=10&max_target=100"
        ),
        reward=reasoning_gym_reward.reward_func,
        max_new_tokens=24,
        max_len=512,
        wrong=wrong_expression,
        goal=0.5,
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
    "guess_number": Task(
        about="the game of the tinker cookbook, in small: a number from 1 to 8 in four turns with hints",
        problems=partial(games, "8 4"),
        reward=None,
        max_new_tokens=5,
        max_len=320,
        repeats=True,
        flags={"train.agent_func_path": str(AGENT)},
    ),
}
