"""Problems of reasoning-gym (pip install openrlhf[gym]) over several turns: a wrong answer is told.

--train.agent_func_path examples/python/agent_reasoning_gym.py --data.label_key label
--data.prompt_dataset "reasoning_gym:chain_sum?size=512&seed=1&max_terms=2&max_digits=1&min_digits=1"

Without --data.apply_chat_template: questions are user messages in the policy's template.
"""

from openrlhf.environments.reasoning_gym import ReasoningGymExecutor


class AgentExecutor(ReasoningGymExecutor):
    def __init__(self):
        super().__init__(max_tries=3)
