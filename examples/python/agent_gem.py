"""Environments of GEM (pip install 'openrlhf[gem]'): the prompt is the environment's id, the label its seed.

python examples/python/agent_gem.py rows.jsonl
--train.agent_func_path examples/python/agent_gem.py --data.prompt_dataset rows.jsonl --data.label_key label
"""

from openrlhf.environments.gym import GymExecutor
from openrlhf.environments.packages import package
from openrlhf.environments.rows import write_rows

gem = package("gem")


class AgentExecutor(GymExecutor):
    def make(self, prompt, label):
        return gem.make(prompt)


def rows():
    return ({"input": "game:GuessTheNumber-v0-easy", "label": seed} for seed in range(512))


if __name__ == "__main__":
    write_rows(rows)
