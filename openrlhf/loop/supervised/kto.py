"""KTO."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from openrlhf.backends.base import Objective
from openrlhf.config.supervised import KTOConfig
from openrlhf.config.supervised_commands import KTO
from openrlhf.data.unpaired import build_unpaired
from openrlhf.loop.supervised.reference import ComparedTask, reference_of
from openrlhf.loop.supervised.task import Parts
from openrlhf.rows import UnpairedRow
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio, unpaired_log_probs


class KTOTask(ComparedTask[KTOConfig]):
    command = KTO
    row_type = UnpairedRow

    def builder(self) -> partial:
        return self.bound(build_unpaired, seed=self.config.train.seed)

    def objective(self, parts: Parts) -> KTOObjective:
        model = self.config.model
        return KTOObjective(
            beta=model.beta,
            desirable_weight=model.desirable_loss_weight,
            undesirable_weight=model.undesirable_loss_weight,
            reference=reference_of(self.config, parts, read=unpaired_log_probs),
        )

    def prepare(self, parts: Parts, objective: Objective) -> Callable[[Sequence[UnpairedRow]], KTOObjective]:
        """Returns a function that sets the objective's KL estimate and fraction of desirable answers for a
        batch. Both are means over all rows and ranks, so they do not depend on the micro-batch size."""
        assert isinstance(objective, KTOObjective)  # built by `objective` above
        log_ratio = MismatchedLogRatio(reference=objective.reference)

        def with_figures(rows: Sequence[UnpairedRow]) -> KTOObjective:
            figures = parts.engine.evaluate(rows, log_ratio)
            kl, desirable = max(0.0, figures["log_ratio"]), figures["desirable_fraction"]
            return replace(objective, kl=kl, desirable_fraction=desirable)

        return with_figures
