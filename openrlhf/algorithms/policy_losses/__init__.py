"""Policy losses: the loss of each action, from its advantage and the probability ratio."""

from openrlhf.algorithms.policy_losses.base import PolicyLoss
from openrlhf.registry import Registry

POLICY_LOSSES = Registry("openrlhf.algorithms.policy_losses", PolicyLoss)
"""Policy losses by their names in `--actor.policy_loss_type`."""
