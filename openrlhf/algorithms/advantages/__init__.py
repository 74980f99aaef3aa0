"""Advantage estimators, which compute the advantages of a step's actions from the rewards."""

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.registry import Registry

ESTIMATORS = Registry("openrlhf.algorithms.advantages", AdvantageEstimator)
"""Estimators by their names in `--algo.advantage.estimator`."""
