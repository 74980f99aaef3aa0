"""Advantage estimators: from the rewards of a step to the advantages of its actions."""

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.registry import Registry

ESTIMATORS = Registry("openrlhf.algorithms.advantages", AdvantageEstimator)
"""By the names that `--algo.advantage.estimator` takes."""
