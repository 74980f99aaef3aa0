"""Checks after weight syncs that engines compute with the weights they were sent. This module asks the
engines, which are Ray actors; backends/weight_sync/stored_weights.py compares.

The trainer computes its log-probs of the probe while it sends, and engines answer among the first requests
after the sync. The check takes next to no time, and passes before any sample of the new weights is trained
on. In partial rollouts an answer may wait for requests in flight, and is compared as soon as it comes.
"""

from collections.abc import Sequence
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
    check_stored,
    differing_weights,
    make_probe,
    reason_of,
)
from openrlhf.cluster.deaths import in_words
from openrlhf.cluster.pending import Handle
from openrlhf.config.ppo import ACTOR_FLAG, PPOConfig
from openrlhf.models.loading import has_experts, policy_tokenizer
from openrlhf.models.vision import image_reader
from openrlhf.types import Metrics, present

if TYPE_CHECKING:  # engine processes need no trainer, whose libraries take seconds to import
    from openrlhf.cluster.rank_groups import PolicyRanks

REMEMBERED = 8
"""Number of latest weight versions whose log-probs are kept, for answers delayed by requests in flight."""


class WeightCheck:
    """Asks the engines of a run for log-probs of a probe, and compares them with the trainer's."""

    def __init__(self, config: PPOConfig, engines: Sequence[Handle], on_gpu: bool) -> None:
        self.config, self.engines, self.on_gpu = config, engines, on_gpu
        self.expected: dict[int, Tensor] = {}
        """Weight version -> the trainer's (L - 1,) log-probs."""
        self.asked: dict[ray.ObjectRef, int] = {}
        """Pending answer -> index of its engine."""
        self.policy: PolicyRanks | None = None
        """The policy that sent these versions."""
        self.metrics: Metrics = {}
        """Largest `PROBE` difference of the answers since the last report."""

    @cached_property
    def limit(self) -> Limit:
        experts = has_experts(self.config.actor.model_name_or_path, ACTOR_FLAG)
        return Limit(dtype=self.config.ds.precision.dtype, on_gpu=self.on_gpu, has_experts=experts)

    @cached_property
    def probe(self) -> Probe:
        config = self.config
        reader = image_reader(config.actor.model_name_or_path) if config.reads_images else None
        return make_probe(policy_tokenizer(config), reader, config.data.max_len - 1)

    def ask(self, policy: "PolicyRanks", version: int, trainer: Tensor) -> None:
        """Asks the engines for the log-probs of the probe. `trainer`: the policy's (L - 1,) log-probs with
        the weights of this version. An engine that still owes an answer is not asked again; every answer
        carries the version that gave it."""
        self.policy, self.expected[version] = policy, trainer
        for old in list(self.expected)[:-REMEMBERED]:
            del self.expected[old]
        busy = set(self.asked.values())
        for i, engine in enumerate(self.engines):
            if i not in busy:
                self.asked[engine.answer.remote(self.probe)] = i

    def take_answers(self, *, wait: bool) -> None:
        """Compares the answers that have arrived, or all of them with `wait`. Raises DifferentWeightsError if
        an engine's log-probs differ from the trainer's."""
        if not self.asked:
            return
        under_way = [*self.asked]
        ready, _ = ray.wait(under_way, num_returns=len(under_way), timeout=None if wait else 0)
        for ref in ready:
            self._compare(self.asked.pop(ref), ray.get(ref))

    def take_metrics(self) -> Metrics:
        metrics, self.metrics = self.metrics, {}
        return metrics

    def _compare(self, engine: int, answer: EngineProbe) -> None:
        trainer = self.expected.get(answer.version)
        if trainer is None:  # no probe was due after that sync, or too many syncs followed
            return
        try:
            difference = check_stored(trainer, engine, answer, self.limit)
        except DifferentWeightsError as error:
            error.text += f" {self._reason(engine)}"
            raise
        self.metrics[PROBE] = max(difference, self.metrics.get(PROBE, 0.0))

    def _reason(self, number: int) -> str:
        """Describes which weights an engine lost or stored differently, as far as they can be read back."""
        engine, policy = self.engines[number], present(self.policy)
        try:
            unwritten = ray.get(engine.unwritten_parameters.remote())
            sent = policy.weight_sketches().result()
            lengths = {name: sketch.length for name, sketch in sent.items()}
            stored = ray.get(engine.layer_sketches.remote(lengths))
        except RayError as error:
            return f"Its layers could not be read back: {in_words(error)}"
        return reason_of(unwritten, differing_weights(sent, stored, self.limit.relative), len(stored))
