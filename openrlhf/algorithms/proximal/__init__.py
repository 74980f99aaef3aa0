"""Proximal policies: what the probability ratio is relative to."""

from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.registry import Registry

PROXIMAL_POLICIES = Registry("openrlhf.algorithms.proximal", ProximalPolicy)
"""By the names that `--algo.advantage.proximal_policy` takes."""
