"""The checks of an RL run, by the event of a step after which they run. Each compares the run's own numbers
with those of invariants.py and verify_rl.py."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import field

from openrlhf.api import (
    Batch,
    Evaluation,
    Hook,
    Metrics,
    PPOConfig,
    PromptSampler,
    Schedule,
    Step,
    Trajectory,
    advantage_arguments,
    not_none,
    notify,
    rollout_metrics,
)
from openrlhf.tools.reference.advantages import plain_advantages
from openrlhf.tools.reference.metrics import plain_log_prob_metrics, plain_rollout_metrics
from openrlhf.tools.selftest.invariants import (
    check_epoch_seeds,
    check_epochs,
    check_evaluated,
    check_lengths,
    check_orders,
    check_other_than_reference,
    check_own_reference,
    check_samples,
    check_schedule,
    check_staleness,
    check_trained,
    equals_reference,
)
from openrlhf.tools.selftest.mismatch import check_mismatch
from openrlhf.tools.selftest.verify_rl import (
    check_advantages,
    check_controller,
    check_evaluation,
    check_metrics,
    synthetic_samples,
)

SHOWS = {"fp32": 1e-7, "fp16": 1e-4, "bf16": 1e-4}
"""`--ds.param_dtype` -> movement of the weights from which on some log-prob is another number: a weight of
0.02 has neighbours 1e-4 away in bf16, and a small adapter's output is lost beside a layer's."""
SYNTHETIC = "synthetic samples"
"""Name of the samples of `synthetic_samples` in errors."""


class StepChecks(Hook):
    """The checks of a run. Holds what later steps are compared with."""

    config: PPOConfig
    prompts: PromptSampler | None = None
    """The order of the prompts, which is checked at once."""
    first_seeds: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, init=False)
    """(prompt id, sample index) -> epoch and seed in the first step of this process."""
    moved: float = field(default=0.0, init=False)
    """Estimate of how far the updates of this process moved a weight of the policy; see `movement`."""
    was_below_precision: bool = field(default=False, init=False)
    passes: dict[str, list[list[set]]] = field(default_factory=dict, init=False)
    """Name of a model -> the batches of each pass of its last update, in the first steps."""

    def __post_init__(self) -> None:
        if self.config.train.verify_steps and self.prompts and self.prompts.shuffles:
            check_epochs("prompts", self.prompts.order, 1)

    def sampled(self, step: Step) -> None:
        config = self.config
        is_random = config.samples_freely
        check_samples(step.samples, config.rollout.n_samples_per_prompt, step.number, is_random=is_random)
        check_epoch_seeds(step.samples, self.first_seeds, step.number)
        check_lengths(step.samples, config.action_limit, step.number)

    def advantages(self, step: Step) -> None:
        batch, is_first = not_none(step.batch), step.number <= self.config.train.verify_steps
        if is_first:
            self._verify_advantages(step, batch)
            self._verify_metrics(step, batch, step.metrics, step.samples)
        self._check_mismatch(step)
        check_staleness(step.metrics, self.config.largest_staleness, step.number)
        if is_first and step.version == 0:  # loaded from the reference's place
            check_own_reference(step.metrics, self.config.ds.param_dtype, step.number)
        if self.moved and equals_reference(batch):
            self._check_change(batch, step.number)

    def scheduled(self, step: Step) -> None:
        """Checks the schedules. In the first steps a model's passes over the samples, those of the previous
        step included, have orders of their own."""
        train = self.config.train
        for name, schedule in step.schedules.items():
            check_schedule(name, schedule, step.trained_on, train.max_epochs, step.number)
            if step.number - 1 <= train.verify_steps > 0:
                passes = list_passes(schedule, train.max_epochs, step.groups)
                check_orders(f"the {name}'s samples", [*self.passes.get(name, []), *passes], step.number)
                self.passes[name] = passes

    def updated(self, step: Step) -> None:
        self._check_mismatch(step)
        if schedule := step.schedules.get("policy"):
            metrics = not_none(step.updated).metrics
            check_trained(metrics, not_none(step.batch), schedule, step.number)
            self.moved = math.hypot(self.moved, movement(metrics, len(schedule)))

    def evaluated(self, evaluation: Evaluation) -> None:
        config, samples, step = self.config, evaluation.samples, evaluation.step
        check_samples(samples, config.eval.n_samples_per_prompt, step, is_random=False)
        longest = config.action_limit and (config.eval.max_new_tokens or config.action_limit)
        check_lengths(samples, longest, step)
        check_evaluated(samples, evaluation.version, step)
        if step <= config.train.verify_steps > 0:
            check_evaluation(evaluation.metrics, samples, step)

    def _check_change(self, batch: Batch, step: int) -> None:
        """Checks an updated policy that equals the reference. Tells if the precision may hide its updates."""
        dtype, lora = self.config.ds.param_dtype, self.config.ds.lora
        scale = lora.alpha / lora.rank if lora.rank else 1.0
        if self.moved * scale >= SHOWS[dtype]:
            check_other_than_reference(batch, step)
        if not self.was_below_precision:
            self.was_below_precision = True
            notify(
                f"warning: step {step}: after updates with --actor.adam.lr {self.config.actor.adam.lr:g}, "
                f"all {len(batch.rollout_log_probs)} log-probs are still those of the reference: the changes "
                f"are below the precision of --ds.param_dtype {dtype}. They add up in the optimizer's "
                "float32 weights. If the KL stays 0, raise --actor.adam.lr or use --ds.param_dtype fp32."
            )

    def _check_mismatch(self, step: Step) -> None:
        config = self.config
        check_mismatch(step.metrics, config.ds.param_dtype, config.largest_mismatch, step.number)

    def _verify_advantages(self, step: Step, batch: Batch) -> None:
        arguments = advantage_arguments(self.config, step.kl.coef)
        check_advantages(batch, plain_advantages(batch, step.finished, **arguments), step.number)
        sources = ["default", *sorted({source for own in arguments["tasks"].values() for source in own})]
        synthetic, samples = synthetic_samples(batch, self.config.longest_response, sources)
        if (expected := plain_advantages(synthetic, samples, **arguments)) is not None:
            synthetic, metrics = not_none(step.assign_advantages)(synthetic, samples)
            check_advantages(synthetic, expected, step.number, SYNTHETIC)
            metrics |= rollout_metrics(samples, step.version)
            self._verify_metrics(step, synthetic, metrics, samples, SYNTHETIC)
        check_controller(step.kl, step.number)

    def _verify_metrics(
        self,
        step: Step,
        batch: Batch,
        metrics: Metrics,
        samples: Sequence[Trajectory],
        name: str = "the step",
    ) -> None:
        expected = plain_rollout_metrics(samples, step.version)
        expected |= plain_log_prob_metrics(batch, self.config.algo.kl.estimator)
        check_metrics(metrics, expected, step.number, name)


def movement(metrics: Metrics, num_steps: int) -> float:
    """Returns about how far an update, with the mean metrics of `num_steps` optimizer steps, moves a weight:
    Adam moves it by the learning rate, in varying directions. Returns 0 if a gradient is 0 or not finite."""
    has_gradient = 0 < metrics.get("grad_norm", 0.0) < math.inf
    return metrics.get("lr", 0.0) * math.sqrt(num_steps) if has_gradient else 0.0


def list_passes(
    schedule: Schedule, epochs: int, groups: Sequence[Hashable] | None = None
) -> list[list[set[Hashable]]]:
    """Returns the batches of each epoch of a schedule: the set of a batch's samples or, if `groups` has the
    group of each sample, of their groups."""
    size = len(schedule) // epochs
    batches = [
        {i if groups is None else groups[i] for rank in mini_batch for i in rank} for mini_batch in schedule
    ]
    return [batches[start : start + size] for start in range(0, len(batches), max(1, size))]
