"""Off-policy corrections: weights for a sampler that is not quite the policy, by its kernels, precision or
staleness."""

from openrlhf.algorithms.corrections.base import Correction
from openrlhf.registry import Registry

CORRECTIONS = Registry("openrlhf.algorithms.corrections", Correction)
"""By the names that `--algo.advantage.is_correction_type` takes."""
