"""Off-policy corrections: weights of the loss that correct for differences between sampler and policy in
kernels, precision or staleness."""

from openrlhf.algorithms.corrections.base import Correction
from openrlhf.registry import Registry

CORRECTIONS = Registry("openrlhf.algorithms.corrections", Correction)
"""Corrections by their names in `--algo.advantage.is_correction_type`."""
