"""Checks after weight syncs that engines compute with the weights that the trainer sent. This module queries
the engines, which are Ray actors; backends/weight_sync/stored_weights.py compares.

The trainer computes its log-probs of the probe before it sends the weights, and the engines compute theirs
right after the sync. The check takes very little time, and finishes before any sample of the new weights is
trained on. With partial rollouts an answer may have to wait for requests in flight, and is compared when it
arrives.
"""

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError
from torch import Tensor

from openrlhf.algorithms.mismatch import PROBE
from openrlhf.backends.weight_sync.stored_weights import (
    DifferentWeightsError,
    EngineProbe,
    Limit,
    Probe,
    build_run_probe,
    check_stored,
    differing_weights,
    explain_difference,
)
from openrlhf.cluster.engine_supervisor import Answers, EngineSupervisor
from openrlhf.cluster.pending import Handle, results
from openrlhf.cluster.process_exits import describe_cause
from openrlhf.config.ppo import PPOConfig
from openrlhf.types import Metrics, not_none

if TYPE_CHECKING:  # imports the trainer's libraries: seconds that engine processes save
    from openrlhf.cluster.rank_groups import PolicyRanks

NUM_VERSIONS = 8
"""Number of latest weight versions whose log-probs are kept, for answers that are delayed by requests in
flight."""


class WeightCheck:
    """Requests log-probs of a probe from all engines, and compares them with the trainer's."""

    def __init__(self, config: PPOConfig, engines: EngineSupervisor, on_gpu: bool) -> None:
        self.config, self.engines, self.on_gpu = config, engines, on_gpu
        self.expected: dict[int, Tensor] = {}
        """Weight version -> the trainer's log-probs, (L - 1,)."""
        self.asked: dict[ray.ObjectRef, tuple[int, Handle]] = {}
        """Pending answer -> index of its engine, and the engine."""
        self.policy: PolicyRanks | None = None
        """The policy that sent these versions."""
        self.metrics: Metrics = {}
        """The metric `PROBE`: maximum over the answers since the last `take_metrics`."""

    @cached_property
    def limit(self) -> Limit:
        return Limit.from_config(self.config, on_gpu=self.on_gpu)

    @cached_property
    def probe(self) -> Probe:
        return build_run_probe(self.config)

    def ask(self, policy: "PolicyRanks", version: int, trainer: Tensor, engines: Collection[int]) -> None:
        """Requests the log-probs of the probe from the engines with these indices. `trainer`: the policy's
        log-probs with the weights of this version, (L - 1,). Engines whose last answer is still pending are
        skipped. Each answer contains the weight version that computed it."""
        self.policy, self.expected[version] = policy, trainer
        for old in list(self.expected)[:-NUM_VERSIONS]:
            del self.expected[old]
        busy = [member for _, member in self.asked.values()]
        for i in engines:
            if (engine := self.engines.members[i]) not in busy:
                self.asked[engine.answer.remote(self.probe)] = i, engine

    def take_answers(self, *, wait: bool, of: Collection[int] | None = None) -> None:
        """Compares the answers that have arrived, or all of them with `wait`. `of`: indices of the engines
        whose answers count; None: all. Raises DifferentWeightsError if an engine's log-probs differ from the
        trainer's. The death of an engine is reported, and its answer is left out."""
        under_way = [ref for ref, (i, _) in self.asked.items() if of is None or i in of]
        if not under_way:
            return
        ready, _ = ray.wait(under_way, num_returns=len(under_way), timeout=None if wait else 0)
        answers = Answers(self.engines, {ref: self.asked.pop(ref) for ref in ready})
        for number, answer in answers.result().items():  # bounded: they are done
            self._compare(number, answer)

    def take_metrics(self) -> Metrics:
        """Returns the metrics since the last call."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    def _compare(self, engine: int, answer: EngineProbe) -> None:
        trainer = self.expected.get(answer.version)
        if trainer is None:  # this version was not checked, or its log-probs are dropped
            return
        try:
            difference = check_stored(trainer, engine, answer, self.limit)
        except DifferentWeightsError as error:
            error.text += f" {self._reason(engine)}"
            raise
        self.metrics[PROBE] = max(difference, self.metrics.get(PROBE, 0.0))

    def _reason(self, number: int) -> str:
        """Returns a message that names the weights that an engine lacks or stores differently, as far as they
        can be read back."""
        engine, policy = self.engines.members[number], not_none(self.policy)
        try:
            (unwritten,) = results([engine.unwritten_parameters.remote()])
            sent = policy.weight_fingerprints().result()  # bounded: by watchdog.py
            lengths = {name: fingerprint.length for name, fingerprint in sent.items()}
            (stored,) = results([engine.layer_fingerprints.remote(lengths)])
        except RayError as error:
            return f"Its layers could not be read back: {describe_cause(error)}"
        return explain_difference(
            unwritten, differing_weights(sent, stored, self.limit.relative), len(stored)
        )
