"""Policy losses: what an action costs, given its advantage and how far the policy has moved."""

from openrlhf.algorithms.policy_losses.base import PolicyLoss
from openrlhf.registry import Registry

POLICY_LOSSES = Registry("openrlhf.algorithms.policy_losses", PolicyLoss)
"""By the names that `--actor.policy_loss_type` takes."""
