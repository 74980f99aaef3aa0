"""Games of TextArena (pip install 'openrlhf[textarena]'): the prompt is the game's name, the label its seed.
The policy plays Nim against a random player; without `opponent` it would play against itself.

python examples/python/agent_textarena.py rows.jsonl
--train.agent_func_path examples/python/agent_textarena.py
--data.prompt_dataset rows.jsonl --data.label_key label
"""

import random
import re

from openrlhf.environments.rows import write_rows
from openrlhf.environments.textarena import TextArenaExecutor


def any_move(told):
    """Takes one object of any pile that has some."""
    board = told.rpartition("Current Pile:")[2]
    piles = [pile for pile, objects in re.findall(r"pile (\d+): (\d+)", board) if int(objects)]
    return f"[{random.choice(piles)} 1]"


class AgentExecutor(TextArenaExecutor):
    def __init__(self):
        super().__init__(num_players=2, opponent=any_move, unfinished=-1.0, piles=[1, 2])


def rows():
    return ({"input": "Nim-v0", "label": seed} for seed in range(512))


if __name__ == "__main__":
    write_rows(rows)
