"""Peak memory of the phases of a step, as metrics of the step."""

from collections.abc import Callable
from typing import Any

from openrlhf.observability.hooks.base import Hook, Step

# bounded .result(): the cluster's watchdog ends calls to processes that make no progress.


class PhaseMemory(Hook):
    """Asks all processes for their peak memory after an update, and adds the answers to the metrics."""

    take: Callable[[], Any]
    """Requests the peaks since the last call, as metrics of a `Pending`."""

    def updated(self, step: Step) -> None:
        self.pending = self.take()

    def synced(self, step: Step) -> None:
        step.metrics |= self.pending.result()
