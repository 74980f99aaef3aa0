"""Environment of verifiers (pip install 'openrlhf[verifiers]'), with its tasks and rewards in this file. An
installed environment needs only `{"taskset": {"id": "its-name"}, "agent": CHAT}`.

python examples/python/agent_verifiers.py rows.jsonl
--train.agent_func_path examples/python/agent_verifiers.py
--data.prompt_dataset rows.jsonl --data.label_key label
"""

import random

from openrlhf.environments.rows import write_rows
from openrlhf.environments.verifiers import CHAT, VerifiersExecutor, vf
from openrlhf.utils import extract_boxed_answer


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(extract_boxed_answer(trace.last_reply) == self.data.answer)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        rng = random.Random(0)
        for _ in range(512):
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            yield Sum(SumData(prompt=f"{a} + {b} = ?", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]  # where verifiers looks for the taskset


class AgentExecutor(VerifiersExecutor):
    def __init__(self):
        super().__init__({"taskset": {"id": __name__}, "agent": CHAT})


def rows():
    return AgentExecutor().rows(512)


if __name__ == "__main__":
    write_rows(rows)
