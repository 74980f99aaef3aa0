from collections.abc import Mapping
from dataclasses import field
from typing import Any

from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.tensor import Tensor


class ByTask(AdvantageEstimator):
    """The estimators of a run with several tasks, each of which shapes the rewards of its task. They compare
    the samples of a prompt alone; what comes after that is the same for all."""

    run: AdvantageEstimator = field(default_factory=AdvantageEstimator)
    """The estimator of all other tasks."""
    tasks: Mapping[str, AdvantageEstimator] = field(default_factory=dict)

    def shape(self, step: StepView) -> Tensor:
        shaped = self.run.shape(step)
        for name, estimator in self.tasks.items():
            is_own = step.truncated.new_tensor([source == name for source in step.sources])
            shaped = estimator.shape(step).where(is_own, shaped)
        return shaped

    def state_dict(self) -> dict[str, Any]:
        tasks = {name: estimator.state_dict() for name, estimator in self.tasks.items()}
        return {"run": self.run.state_dict(), "tasks": tasks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = [(self.run, state["run"]), *((self.tasks[name], own) for name, own in state["tasks"].items())]
        for estimator, own in pairs:
            if own:
                estimator.load_state_dict(own)
