"""Advantage estimator for --algo.advantage.estimator examples/python/opo.py:OPO."""

import torch
from torch import Tensor

from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import group_sums


class OPO(AdvantageEstimator):
    """On-policy RL with optimal reward baseline (OPO), minus the group's mean weighted by lengths.

    On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585

        A_i = R_i - sum_j L_j R_j / sum_j L_j,   L_j: actions of sample j

    Where gradients of tokens are alike, this baseline has the least variance. A sample alone in its group
    earns 0, and so does a group without actions.
    """

    needs_group = True

    def shape(self, step: StepView) -> Tensor:
        weighted, _ = group_sums(step.rewards.double() * step.lengths, step.group_ids)
        lengths, sizes = group_sums(step.lengths, step.group_ids)
        baseline = weighted / lengths
        return torch.where((sizes > 1) & (lengths > 0), step.rewards - baseline, 0)
