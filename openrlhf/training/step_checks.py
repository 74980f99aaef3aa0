"""The checks of an RL run, by the place of a step at which they run. Each compares the run's own numbers with
those of invariants.py, verify_rl.py and verify_metrics.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openrlhf.algorithms.kl import KLController
from openrlhf.algorithms.mismatch import check_mismatch
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import notify
from openrlhf.training.credit import credit_arguments
from openrlhf.training.diagnostics import rollout_metrics
from openrlhf.training.invariants import (
    check_epoch_seeds,
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
from openrlhf.training.plain_rl import plain_advantages
from openrlhf.training.schedule import passes_of
from openrlhf.training.verify_metrics import (
    check_evaluation,
    check_metrics,
    plain_log_prob_metrics,
    plain_rollout_metrics,
)
from openrlhf.training.verify_rl import check_advantages, check_controller, made_up_samples
from openrlhf.types import Batch, Metrics, Schedule, Trajectory, Updated

AssignCredit = Callable[[Batch, Sequence[Trajectory]], tuple[Batch, Metrics]]

SHOWS = {"fp32": 1e-7, "fp16": 1e-4, "bf16": 1e-4}
"""`--ds.param_dtype` -> movement of the weights from which on some log-prob is another number: a weight of
0.02 has neighbours 1e-4 away in bf16, and a small adapter's output is lost beside a layer's."""
MADE_UP = "made-up samples"
"""Name of the samples of `made_up_samples` in errors."""


@dataclass(kw_only=True)
class StepChecks:
    """The checks of a run. Holds what later steps are compared with. `step` is the number of a step, from 1,
    and `version` that of the weights that it trains."""

    config: PPOConfig
    first_seeds: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, init=False)
    """(prompt id, sample index) -> epoch and seed in the first step of this process."""
    moved: float = field(default=0.0, init=False)
    """Estimate of how far the updates of this process moved a weight of the policy; see `movement`."""
    was_below_precision: bool = field(default=False, init=False)
    passes: dict[str, list[list[set]]] = field(default_factory=dict, init=False)
    """Name of a model -> the batches of each pass of its last update, in the first steps."""

    def sampled(self, trajectories: Sequence[Trajectory], step: int) -> None:
        """Checks the samples of a step."""
        config = self.config
        is_random = config.samples_freely
        check_samples(trajectories, config.rollout.n_samples_per_prompt, step, is_random=is_random)
        check_epoch_seeds(trajectories, self.first_seeds, step)
        check_lengths(trajectories, config.action_limit, step)

    def credited(
        self,
        metrics: Metrics,
        batch: Batch,
        trajectories: Sequence[Trajectory],
        *,
        assign: AssignCredit,
        kl: KLController,
        version: int,
        step: int,
    ) -> None:
        """Checks log-probs, credit and metrics of a step. `assign`: assigns credit as the step does."""
        if step <= self.config.train.verify_steps:
            self._verify_credit(batch, [t for t in trajectories if t.ok], assign, kl, version, step)
            self._verify_metrics(metrics, batch, trajectories, version, step)
        self.mismatch(metrics, step)
        check_staleness(metrics, self.config.largest_staleness, step)
        if step <= self.config.train.verify_steps and version == 0:  # loaded from the reference's place
            check_own_reference(metrics, self.config.ds.param_dtype, step)
        if self.moved and equals_reference(batch):
            self._check_change(batch, step)

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

    def mismatch(self, metrics: Metrics, step: int) -> None:
        config = self.config
        check_mismatch(metrics, config.ds.param_dtype, config.largest_mismatch, step)

    def scheduled(
        self,
        schedules: Mapping[str, Schedule],
        trained_on: Sequence[int],
        groups: Sequence[tuple[int, int]] | None,
        step: int,
    ) -> None:
        """Checks the schedules of an update. In the first steps a model's passes over the samples, those of
        the previous step included, have orders of their own."""
        train = self.config.train
        for name, schedule in schedules.items():
            check_schedule(name, schedule, trained_on, train.max_epochs, step)
            if step - 1 <= train.verify_steps > 0:
                passes = passes_of(schedule, train.max_epochs, groups)
                check_orders(f"the {name}'s samples", [*self.passes.get(name, []), *passes], step)
                self.passes[name] = passes

    def updated(self, updated: Updated, batch: Batch, schedule: Schedule, step: int) -> None:
        """Checks an update, whose policy had this schedule; an empty one if the policy was not trained."""
        if schedule:
            check_trained(updated.metrics, batch, schedule, step)
            self.moved = math.hypot(self.moved, movement(updated.metrics, len(schedule)))

    def evaluated(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, version: int, step: int
    ) -> None:
        """Checks the samples and metrics of an evaluation after `step` steps."""
        config = self.config
        check_samples(trajectories, config.eval.n_samples_per_prompt, step, is_random=False)
        check_lengths(trajectories, config.action_limit, step)
        check_evaluated(trajectories, version, step)
        if step <= config.train.verify_steps > 0:
            check_evaluation(metrics, trajectories, step)

    def _verify_credit(
        self,
        batch: Batch,
        finished: Sequence[Trajectory],
        assign: AssignCredit,
        kl: KLController,
        version: int,
        step: int,
    ) -> None:
        """Compares advantages, of the batch and of made-up samples, and changes of the KL coefficient with
        plain formulas."""
        arguments = credit_arguments(self.config, kl.coef)
        check_advantages(batch, plain_advantages(batch, finished, **arguments), step)
        made_up, samples = made_up_samples(batch, self.config.longest_response)
        if (expected := plain_advantages(made_up, samples, **arguments)) is not None:
            made_up, metrics = assign(made_up, samples)
            check_advantages(made_up, expected, step, MADE_UP)
            metrics |= rollout_metrics(samples, version)
            self._verify_metrics(metrics, made_up, samples, version, step, MADE_UP)
        check_controller(kl, step)

    def _verify_metrics(
        self,
        metrics: Metrics,
        batch: Batch,
        trajectories: Sequence[Trajectory],
        version: int,
        step: int,
        name: str = "the step",
    ) -> None:
        """Compares the metrics of samples, which are called `name`, with plain formulas."""
        expected = plain_rollout_metrics(trajectories, version)
        expected |= plain_log_prob_metrics(batch, self.config.algo.kl.estimator)
        check_metrics(metrics, expected, step, name)


def movement(metrics: Metrics, num_steps: int) -> float:
    """Returns about how far an update, with the mean metrics of `num_steps` optimizer steps, moves a weight:
    Adam moves it by the learning rate, in varying directions. Returns 0 if a gradient is 0 or not finite."""
    has_gradient = 0 < metrics.get("grad_norm", 0.0) < math.inf
    return metrics.get("lr", 0.0) * math.sqrt(num_steps) if has_gradient else 0.0
