"""Environment that lets the policy try again: a wrong answer has a negative reward and gets feedback, a right
one ends the episode.

--train.agent_func_path examples/python/agent_retry.py --train.max_turns 3 --data.label_key label

FEEDBACK uses the markup of the demo's model; change it to that of yours. It ends where the policy answers.
"""

from openrlhf.agents.base import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils import extract_boxed_answer

FEEDBACK = "<|user|>Wrong. Try again.<|end|><|assistant|>"


class Retry(AgentInstanceBase):
    def __init__(self):
        self.tries = 0

    async def step(self, states, **kwargs):
        self.tries += 1
        right = extract_boxed_answer(states["action_text"]) == states["label"]
        return {
            "rewards": 1.0 if right else -0.1,
            "scores": float(right),
            "environment_feedback": FEEDBACK,
            "done": right,
            "extra_logs": {"tries": self.tries, "right_at_once": float(right and self.tries == 1)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Retry)
