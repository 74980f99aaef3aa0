"""Problems of reasoning-gym over several turns: after a wrong answer the policy tries again."""

from typing import Any

from openrlhf.api import find_entry
from openrlhf.environments.gym import GymExecutor
from openrlhf.environments.packages import package
from openrlhf.tasks.reasoning_gym_reward import extract_answer

package("reasoning_gym")


class ReasoningGymExecutor(GymExecutor):
    """Runs the problems of `--data.prompt_dataset reasoning_gym:NAME?size=N&seed=S`. The reward is the
    verifier's score of the last answer; a score of 1 ends the episode."""

    draws_globally = False

    def __init__(self, max_tries: int = 3, feedback: str = "This is not right. Try again.") -> None:
        super().__init__()
        self.max_tries, self.feedback = max_tries, feedback

    def seed(self, label: Any) -> int:
        """Returns 0: the label has the problem's seed."""
        return 0

    def make(self, prompt: str, label: Any) -> "Problem":
        return Problem(prompt, label, self.max_tries, self.feedback)


class Problem:
    """A TextEnvironment of one problem. The score of the last turn is the reward; earlier turns earn 0."""

    def __init__(self, question: str, label: str, max_tries: int, feedback: str) -> None:
        self.question, self.max_tries, self.feedback = question, max_tries, feedback
        self.dataset, self.entry = find_entry(label)
        self.tries = 0

    def reset(self, *, seed: int) -> tuple[str, dict]:
        return self.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Scores an answer. Raises whatever the verifier raises."""
        self.tries += 1
        score = float(self.dataset.score_answer(extract_answer(action)[0], self.entry))
        over = score >= 1 or self.tries == self.max_tries
        return self.feedback, score if over else 0.0, over, False, {}
