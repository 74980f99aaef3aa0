"""An agent that guesses a number from hints: "Higher than 5.", "Lower than 7.".

The prompt of a row is "HIGHEST TRIES", such as "1024 10"; its label is the seed of the number. The reward is
1 if the number is found, else 0. Halving the interval finds every number if 2 ** TRIES > HIGHEST.
"""

import random
import re

from openrlhf.environments.gym import GymExecutor

_NUMBER = re.compile(r"\s*(?:Guess:)?\s*(\d+)")


class GuessNumber:
    """One game. `step` returns the hint, and 1.0 when the number is found."""

    def __init__(self, highest: int, tries: int) -> None:
        self.highest, self.tries = highest, tries

    def reset(self, *, seed: int) -> tuple[str, dict]:
        self.secret, self.used = random.Random(seed).randint(1, self.highest), 0
        return f"Guess a number from 1 to {self.highest}. Answer with the number alone.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.used += 1
        found, is_last = _NUMBER.match(action), self.used == self.tries
        if found is None:
            return "Answer with the number alone.", 0.0, False, is_last, {}
        guess = int(found[1])
        if guess == self.secret:
            return "", 1.0, True, False, {}
        return f"{'Higher' if guess < self.secret else 'Lower'} than {guess}.", 0.0, False, is_last, {}


class AgentExecutor(GymExecutor):
    draws_globally = False

    def make(self, prompt: str, label: int) -> GuessNumber:
        highest, tries = map(int, prompt.split())
        return GuessNumber(highest, tries)
