"""Proximal policies, the anchors of the clipped probability ratio."""

from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.registry import Registry

PROXIMAL_POLICIES = Registry("openrlhf.algorithms.proximal", ProximalPolicy)
"""Proximal policies by their names in `--algo.advantage.proximal_policy`."""
