"""Advantage estimators, which turn the rewards of a step into advantages of its actions."""

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.registry import Registry

ESTIMATORS = Registry("openrlhf.algorithms.advantages", AdvantageEstimator)
"""Estimators by their names in `--algo.advantage.estimator`."""
