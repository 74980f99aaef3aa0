"""Environments of NVIDIA NeMo Gym, whose servers run beside the training (docs/environments.md).

python examples/python/agent_nemo_gym.py dataset_of_nemo_gym.jsonl rows.jsonl
--train.agent_func_path examples/python/agent_nemo_gym.py
--data.prompt_dataset rows.jsonl --data.label_key label
"""

import os

from openrlhf.environments.nemo_gym import NeMoGymExecutor, rows
from openrlhf.environments.rows import write_rows

AGENTS = {"simple_agent": os.environ.get("NEMO_GYM_AGENT", "http://127.0.0.1:8001")}
MODEL_PORT = int(os.environ.get("NEMO_GYM_MODEL_PORT", "8100"))
"""Port of the policy's server: set the base_url of NeMo Gym's model server to http://127.0.0.1:8100/v1."""


class AgentExecutor(NeMoGymExecutor):
    def __init__(self):
        super().__init__(AGENTS, MODEL_PORT)


def read(dataset):
    """Converts DATASET, a JSON lines file of NeMo Gym's tasks, to prompts."""
    with open(dataset, encoding="utf-8") as lines:
        yield from rows(lines)


if __name__ == "__main__":
    write_rows(read)
