"""Problems of reasoning-gym (pip install 'openrlhf[gym]') over several turns: a wrong answer
gets feedback and another try.

python examples/python/agent_reasoning_gym.py rows.jsonl
--train.agent_func_path examples/python/agent_reasoning_gym.py
--data.prompt_dataset rows.jsonl --data.label_key label

--data.prompt_dataset may also be PROBLEMS itself. Leave --data.apply_chat_template out: questions are user
messages in the policy's template.
"""

from openrlhf.data.reasoning_gym import gym_rows
from openrlhf.environments.reasoning_gym import ReasoningGymExecutor
from openrlhf.environments.rows import write_rows

PROBLEMS = "reasoning_gym:chain_sum?size=512&seed=1&max_terms=2&max_digits=1&min_digits=1"


class AgentExecutor(ReasoningGymExecutor):
    def __init__(self):
        super().__init__(max_tries=3)


def rows():
    return gym_rows(PROBLEMS, "PROBLEMS")


if __name__ == "__main__":
    write_rows(rows)
