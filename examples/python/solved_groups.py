"""A hook that measures how many prompts have nothing left to teach: all their samples are right.

openrlhf ppo ... --train.hooks examples/python/solved_groups.py:SolvedGroups
"""

from collections import defaultdict

import openrlhf as rl


class SolvedGroups(rl.Hook):
    """Adds the share of prompts whose samples all have the highest reward of the step."""

    def advantages(self, step: rl.Step) -> None:
        groups = defaultdict(list)
        for sample in step.finished:
            groups[sample.group].append(sample.reward)
        best = max(max(rewards) for rewards in groups.values())
        solved = sum(min(rewards) == best for rewards in groups.values())
        step.metrics["solved_groups"] = solved / len(groups)
