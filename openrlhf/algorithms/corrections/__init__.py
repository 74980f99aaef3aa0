"""Off-policy corrections: loss weights for a sampler that differs from the policy by kernels, precision or
staleness."""

from openrlhf.algorithms.corrections.base import Correction
from openrlhf.registry import Registry

CORRECTIONS = Registry("openrlhf.algorithms.corrections", Correction)
"""Corrections by their names in `--algo.advantage.is_correction_type`."""
