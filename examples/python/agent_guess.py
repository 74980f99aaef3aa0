"""Number guessing with hints: an environment in one file, to copy.

python examples/python/agent_guess.py rows.jsonl
--train.agent_func_path examples/python/agent_guess.py --data.prompt_dataset rows.jsonl --data.label_key label

Leave --data.apply_chat_template out: observations are user messages in the policy's template.
"""

import random

from openrlhf.environments.gym import GymExecutor
from openrlhf.environments.rows import write_rows
from openrlhf.utils import extract_boxed_answer


class Guess:
    """Environment whose seed decides the number, so that all samples of a prompt look for the same one. A
    guess that the hints have excluded costs something."""

    highest, max_tries = 8, 4

    def reset(self, *, seed):
        self.secret, self.tries = random.Random(seed).randint(1, self.highest), 0
        self.low, self.high = 1, self.highest
        return f"Guess a number from 1 to {self.highest}. Answer \\boxed{{number}}.", {}

    def step(self, action):
        self.tries += 1
        guess = extract_boxed_answer(action) or ""
        if guess == str(self.secret):
            return "", 1.0, True, False, {}
        over = self.tries == self.max_tries
        if not guess.isdecimal() or not self.low <= int(guess) <= self.high:
            return f"It is between {self.low} and {self.high}.", -0.25, False, over, {}
        if int(guess) < self.secret:
            self.low = int(guess) + 1
            return f"Higher than {guess}.", 0.0, False, over, {}
        self.high = int(guess) - 1
        return f"Lower than {guess}.", 0.0, False, over, {}


class AgentExecutor(GymExecutor):
    draws_globally = False

    def make(self, prompt, label):
        return Guess()


def rows():
    return ({"input": "guess", "label": seed} for seed in range(512))


if __name__ == "__main__":
    write_rows(rows)
