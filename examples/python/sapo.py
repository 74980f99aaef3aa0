"""Policy loss for --actor.policy_loss_type examples/python/sapo.py:SAPO, with options of its own:
--algo.options.tau_negative 1.1."""

from typing import Annotated

import torch
from torch import Tensor

from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.ranges import Range


class SAPO(PolicyLoss):
    """Soft adaptive policy optimization (SAPO), a sigmoid gate in the place of the clip.

    Soft Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347

        l_t = -4 / tau * sigmoid(tau * (ratio - 1)) * A,   tau = tau_positive where A > 0, else tau_negative

    On policy its gradient is that of PPO. Away from the ratio 1 the gradient fades, the faster the larger tau
    is; no bound is ever active, and the clip's flags are not read.
    """

    tau_positive: Annotated[float, Range(above=0)] = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Range(above=0)] = 1.05
    """Temperature of the gate elsewhere."""

    def __call__(self, row: RowView) -> tuple[Tensor, Tensor, Tensor]:
        ratio = row.log_ratio.exp()
        tau = torch.where(row.advantages > 0, self.tau_positive, self.tau_negative)
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return -gate * row.advantages, never, never
