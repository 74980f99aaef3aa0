"""Takes the samples of an RL step from a run's journal instead of from engines."""

from typing import Any

from openrlhf.api import Collector, StalenessLimit, Step, read_journal
from openrlhf.tools.replay.recorded import RecordedRun


class JournalCollector(Collector):
    """Returns the samples that a recorded run trained on, in the same order."""

    def __init__(self, source: RecordedRun, staleness_limit: StalenessLimit, last_step: int) -> None:
        """`last_step`: the last step whose samples are returned."""
        self._journals, self.staleness_limit, self._last_step = source.rollouts(), staleness_limit, last_step
        self._step = 0

    @property
    def is_exhausted(self) -> bool:
        return self._step == self._last_step

    def fill(self, step: Step) -> None:
        """Sets the samples of an RL step. Limits on failed samples are not checked again, because they count
        samples that the step did not train on too."""
        self._step = step.number
        step.samples = read_journal(self._journals[step.number])

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the journal is the only state."""
        return {}
