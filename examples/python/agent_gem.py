"""Environments of GEM (pip install openrlhf[gem]): the prompt is the environment's id, the label its seed.

python examples/python/agent_gem.py rows.jsonl
--train.agent_func_path examples/python/agent_gem.py --data.prompt_dataset rows.jsonl --data.label_key label
"""

import json
import sys

from openrlhf.environments.gym import GymExecutor
from openrlhf.environments.packages import package

gem = package("gem")


class AgentExecutor(GymExecutor):
    def make(self, prompt, label):
        return gem.make(prompt)


def main(path):
    rows = ({"input": "game:GuessTheNumber-v0-easy", "label": seed} for seed in range(512))
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1])
