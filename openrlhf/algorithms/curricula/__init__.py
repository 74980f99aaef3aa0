"""Curricula, which choose the prompts of a run by what the policy has learned."""

from openrlhf.algorithms.curricula.base import Curriculum
from openrlhf.registry import Registry

CURRICULA = Registry("openrlhf.algorithms.curricula", Curriculum)
"""Curricula by their names in `--data.curriculum`."""
