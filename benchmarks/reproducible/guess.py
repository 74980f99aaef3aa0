"""A game of several turns: the example's number guessing with more numbers, and players to learn from."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from agent_guess import Guess  # examples/python/

from openrlhf.environments.gym import GymExecutor


class Game(Guess):
    """Five guesses find any of 31 numbers, if each halves what is left."""

    highest, max_tries = 31, 5


class AgentExecutor(GymExecutor):
    draws_globally = False

    def make(self, prompt: str, label: Any) -> Game:
        return Game()


def rows(seed: int) -> Iterator[dict[str, Any]]:
    for number in count(100_000 * (seed + 1)):
        yield {"input": f"game {number}", "label": number}


def play(row: dict[str, Any], rng: random.Random, *, careful: float) -> Iterator[dict[str, Any]]:
    """Yields one row for each turn of a game: some players halve what is left, others guess any number."""
    game, over, halves = Game(), False, rng.random() < careful
    told, _ = game.reset(seed=row["label"])
    messages: list[dict[str, str]] = []
    while not over:
        number = (game.low + game.high) // 2 if halves else rng.randint(1, game.highest)
        messages = [*messages, {"role": "user", "content": told}]
        guess = f"\\boxed{{{number}}}"
        yield {"input": messages, "output": guess}
        messages = [*messages, {"role": "assistant", "content": guess}]
        told, _, right, out_of_tries, _ = game.step(guess)
        over = right or out_of_tries
