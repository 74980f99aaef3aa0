"""The single controller of PPO and related algorithms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.algorithms.kl import KLController
from openrlhf.backends.base import ModelRanks, Pending, Rollout, TrainableRanks
from openrlhf.backends.finite import NotFiniteError
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import is_due
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.observability.journal import Trained
from openrlhf.observability.observer import Observer
from openrlhf.stopping import Dropped, Stop
from openrlhf.training.checkpoints import BEST, COPY, CheckpointFolder
from openrlhf.training.collect import Collected, Collector, check_failures, check_stops, sample_all
from openrlhf.training.credit import assign_credit, credit_arguments, log_prob_metrics
from openrlhf.training.diagnostics import rollout_metrics
from openrlhf.training.evaluate import as_scores, evaluation_metrics
from openrlhf.training.invariants import check_epochs
from openrlhf.training.schedule import schedule_of
from openrlhf.training.step_checks import StepChecks
from openrlhf.types import Batch, Metrics, Prompt, PromptGroup, Schedule, Trajectory, Updated

# bounded .result(): the cluster's watch ends calls to processes that make no progress.

PolicyT = TypeVar("PolicyT", bound=TrainableRanks)

STATE_VERSION = 2
"""Version of the format of `PPOTrainer.state`. States of version 1 have no entry `version`."""


@dataclass(kw_only=True)
class PPOTrainer(Generic[PolicyT]):
    """Runs the RL loop. It uses no GPU itself, and does not depend on Ray, vLLM or DeepSpeed."""

    config: PPOConfig
    rollout: Rollout[PolicyT]
    policy: PolicyT
    reference: ModelRanks | None
    """None if there is no KL penalty or loss."""
    teacher: ModelRanks | None = None
    """None without on-policy distillation."""
    critic: TrainableRanks | None = None
    """None for estimators without a critic."""
    prompts: InitVar[PromptSampler]
    eval_prompts: PromptDataset | Sequence[Prompt]
    """Empty without evaluation."""
    checkpoints: CheckpointFolder
    observer: Observer
    kl: KLController
    total_steps: int
    """Number of RL steps of the whole run."""
    peak_memory: Callable[[], Pending[Metrics]]
    """Returns the peak memory of each phase since the previous call."""
    restored: InitVar[dict | None] = None
    """The `state` of a checkpoint to resume from, as returned by `restore`; None for a new run."""
    step: int = field(default=0, init=False)
    """Number of RL steps done."""
    optimizer_steps: int = field(default=0, init=False)
    """Number of optimizer steps of the policy."""
    saved_step: int = field(default=0, init=False)
    """The last step with a checkpoint."""
    unfinished: tuple[str, float | None] | None = field(default=None, init=False)
    """Tag and metric of the checkpoint that is being written while training goes on."""
    stop: Stop = field(default_factory=Stop, init=False)
    best_metric: float | None = field(default=None, init=False)
    """Largest value of `ckpt.best_metric_key` so far."""
    eval_sources: list[str] = field(default_factory=list, init=False)
    """Sources of the prompts in the last evaluation."""
    checks: StepChecks = field(init=False)
    collector: Collector = field(init=False)
    estimator: AdvantageEstimator = field(init=False)

    def __post_init__(self, prompts: PromptSampler, restored: dict | None) -> None:
        if self.config.train.verify_steps and prompts.shuffles:
            check_epochs("prompts", prompts.order, 1)
        self.checks = StepChecks(config=self.config)
        self.collector = Collector(self.config, prompts, self.rollout, self.on_group)
        self.estimator = self.config.algo.build_estimator()
        if restored is not None:
            check_version(restored)
            self.step = self.saved_step = restored["step"]
            changed = self.checkpoints.changed
            if changed is None:  # the best checkpoint of a fork is one of its own
                self.best_metric = restored["best_metric"]
            self.optimizer_steps = restored.get("optimizer_steps", 0)
            if self.checkpoints.fork.get("data_from") != self.step:
                self.collector.load_state_dict(restored["collector"], again=bool(changed))
            if any(flag.startswith("--algo.") for flag in changed or ()):
                return
            self.kl = replace(self.kl, coef=restored["kl_coef"])
            if state := restored.get("estimator"):  # older checkpoints have none
                self.estimator.load_state_dict(state)

    def fit(self) -> None:
        """Runs the loop: generate, compute log-probs, assign credit, update, sync, evaluate, log, save.

        On a request to stop, saves a checkpoint at a step boundary and raises Stopped. Samples of the next
        step are dropped; a resumed run samples them again."""
        boundary = self.state()
        try:
            with self.stop.dropping():
                self.rollout.sync(self.policy, self.weight_version).result()
                if self.step == 0 and self.is_eval_due:
                    self.observer.log_step(0, self.evaluate())
            while self.step < self.total_steps:
                boundary = self.state()
                with self.stop.dropping():
                    collected = self.collect()
                if not collected.trajectories:
                    self.end_early(collected)
                    break
                self.run_step(collected)
        except Dropped:
            self.end_at_boundary(boundary)
        except NotFiniteError:
            self.finish_checkpoint()
            raise
        self.finish_checkpoint()

    def run_step(self, collected: Collected) -> None:
        """Trains on the collected samples, syncs, evaluates, logs and saves."""
        if self.collector.is_exhausted:
            self.total_steps = self.step + 1
        metrics = self.train_on(collected) | collected.metrics
        self.step += 1
        with self.observer.phase("sync"):
            memory = self.peak_memory()  # overlaps the sync, whose own peak comes with the next step
            metrics |= self.rollout.sync(self.policy, self.weight_version).result() | memory.result()
        if self.is_eval_due:
            metrics |= self.evaluate()
        self.observer.log_step(self.step, metrics)
        if is_due(self.step, self.config.ckpt.save_steps):
            self.save(f"global_step{self.step}", self._metric_of(metrics))
        elif self.unfinished and all(model.has_written().result() for model in self.trained):
            self.finish_checkpoint()
        if self.stop.is_requested:
            self.end_at_boundary(self.state(), self._metric_of(metrics))

    def end_at_boundary(self, state: dict, metric: float | None = None) -> NoReturn:
        """Saves a checkpoint of the last step, unless there is one, and raises Stopped. `state`: the value of
        `self.state()` at the end of that step."""
        if self.step and self.saved_step != self.step:
            self.save(f"global_step{self.step}", metric, state)
        self.finish_checkpoint()
        raise self.stop.at_boundary(saved=self.step > 0)

    def end_early(self, collected: Collected) -> None:
        """Ends the run if filtering rejected all remaining prompts."""
        self.log_filtered(collected)
        self.observer.message(f"no prompt is left for step {self.step + 1} of {self.total_steps}")
        is_evaluated, self.total_steps = self.is_eval_due, self.step
        if self.is_eval_due and not is_evaluated:
            self.observer.log_step(self.step, self.evaluate())

    def collect(self) -> Collected:
        """Collects the trajectories of the next RL step."""
        admission = self.collector.admission
        ahead = admission.may_exceed or admission.max_staleness
        total = None if ahead else self.config.samples_per_step
        with self.observer.phase("generate", total):
            return self.collector.next_batch(self.step + 1)

    def on_group(self, group: PromptGroup) -> None:
        self.observer.advance(num_samples(group.trajectories))

    @property
    def is_eval_due(self) -> bool:
        """True before the first step, after every `eval.steps` steps and after the last one."""
        steps = self.config.eval.steps
        if not self.eval_prompts or steps <= 0:
            return False
        return is_due(self.step, steps) or self.step == self.total_steps

    def train_on(self, collected: Collected) -> Metrics:
        """Trains on the collected samples, and writes them to the journal even if training fails."""
        trained = None
        try:
            check_stops(collected.sampled, self.config.rollout.stop_on or (), self.step + 1)
            if (
                num_samples(collected.sampled) >= self.config.samples_per_step
            ):  # few samples are no estimate of the failure rate
                check_failures(collected.sampled, self.config.reward.max_failed_ratio, self.step + 1)
            check_failures(collected.trajectories, 1.0, self.step + 1)
            self.checks.sampled(collected.trajectories, self.step + 1)
            metrics, trained = self.learn_from(collected.trajectories)
        finally:
            self.observer.log_rollouts(self.step + 1, collected.trajectories, trained=trained)
            self.log_filtered(collected)
        return metrics

    def log_filtered(self, collected: Collected) -> None:
        if collected.filtered:
            self.observer.log_rollouts(self.step + 1, collected.filtered, name="filtered")

    def learn_from(self, trajectories: Sequence[Trajectory]) -> tuple[Metrics, Trained]:
        """Computes log-probs, assigns credit and updates the models. Returns metrics, and the record for the
        journal."""
        step, version = self.step + 1, self.weight_version
        finished = [t for t in trajectories if t.ok]
        batch = Batch.of(finished, version)
        with self.observer.phase("logprobs"):
            batch = self.forward(batch)
        batch, credit_metrics = self.assign_credit(batch, finished)
        metrics = rollout_metrics(trajectories, version) | credit_metrics
        self.checks.credited(
            metrics, batch, trajectories, assign=self.assign_credit, kl=self.kl, version=version, step=step
        )
        batch = replace(batch, teacher_log_probs=None)
        by_prompt = self.config.train.shuffle == "group"
        groups = [t.group for t in finished] if by_prompt else None
        trained_on = self.trained_on(finished)
        schedules = self.schedules(batch, trained_on, num_samples(trajectories), groups)
        self.checks.scheduled(schedules, trained_on, groups, step)
        with self.observer.phase("update"):
            updated = self.update(batch, schedules)
        metrics |= updated.metrics
        if updated.log_probs is not None:
            first = replace(batch.select(updated.first), log_probs=updated.log_probs)
            metrics |= log_prob_metrics(first, self.config.algo.kl.estimator)
            self.checks.mismatch(metrics, step)
            if len(first) == len(batch):
                batch = replace(batch, log_probs=batch.put_together([updated.first], [updated.log_probs]))
        schedule = schedules.get("policy", [])
        self.checks.updated(updated, batch, schedule, step)
        trained = Trained(batch=batch, schedule=schedule, first_update=self.optimizer_steps)
        self.optimizer_steps += len(schedule)
        if self.policy_learns:
            self.kl = self.kl.update(metrics.get("kl/mean", 0.0), num_samples(finished))
        return metrics, trained

    def assign_credit(self, batch: Batch, finished: Sequence[Trajectory]) -> tuple[Batch, Metrics]:
        arguments = credit_arguments(self.config, self.kl.coef)
        return assign_credit(batch, finished, estimator=self.estimator, **arguments)

    def forward(self, batch: Batch) -> Batch:
        """Returns the batch with the log-probs of policy, reference and teacher and the critic's values, as
        far as the run has these models."""
        policy = None if self.config.skips_old_log_probs else self.policy
        return with_outputs(batch, policy, self.critic, self.teacher, self.reference, self.step + 1)

    @property
    def weight_version(self) -> int:
        """Version of the policy's weights: the number of RL steps that updated them. Steps of the critic's
        warm-up do not count."""
        return max(0, self.step - self.config.frozen_actor_steps)

    @property
    def policy_learns(self) -> bool:
        """True if the next update trains the policy; False during the critic's warm-up."""
        return self.step >= self.config.frozen_actor_steps

    @property
    def learners(self) -> dict[str, TrainableRanks]:
        """The models that the next update trains, the policy last."""
        critic = {"critic": self.critic} if self.critic else {}
        return critic | ({"policy": self.policy} if self.policy_learns else {})

    def trained_on(self, finished: Sequence[Trajectory]) -> list[int]:
        """Returns the indices of the samples to train on. Raises RunError if none is left."""
        masks = self.config.rollout.mask_truncated
        if left := [i for i, t in enumerate(finished) if not (masks and t.truncated)]:
            return left
        text = (
            f"step {self.step + 1}: all {len(finished)} samples are truncated, so none is left to train on.\n"
            "Raise --rollout.max_new_tokens or --data.max_len."
        )
        raise RunError(ErrorCode.EPISODES_FAILED, text, flag="--rollout.mask_truncated")

    def schedules(
        self,
        batch: Batch,
        trained_on: Sequence[int],
        num_sampled: int,
        groups: Sequence[tuple[int, int]] | None = None,
    ) -> dict[str, Schedule]:
        """Returns a schedule of `train.max_epochs` passes over the sequences `trained_on` for each learner.
        See `schedule_of`."""
        return {
            name: schedule_of(
                self.config, model, batch, trained_on, num_sampled, groups, routed=name == "policy"
            )
            for name, model in self.learners.items()
        }

    def update(self, batch: Batch, schedules: Mapping[str, Schedule]) -> Updated:
        """Updates all learners, in parallel if they have separate GPUs."""
        pending = [
            model.update(batch, schedules[name], self.kl.coef) for name, model in self.learners.items()
        ]
        updated = [update.result() for update in pending]
        metrics = {name: value for of_model in updated for name, value in of_model.metrics.items()}
        return updated[-1]._replace(metrics=metrics)  # the policy comes last

    def evaluate(self) -> Metrics:
        """Samples the evaluation prompts, logs the samples, and returns the `eval/...` metrics."""
        num_samples = len(self.eval_prompts) * self.config.eval.n_samples_per_prompt
        with self.observer.phase("evaluate", total=num_samples):
            trajectories = self.sample_all(list(self.eval_prompts))  # list() reads their images once
        self.eval_sources = sorted({t.prompt.source for t in trajectories})
        metrics = evaluation_metrics(trajectories)
        self.checks.evaluated(trajectories, metrics, self.weight_version, self.step)
        self.observer.log_rollouts(self.step, trajectories, name="eval")
        self._keep_if_best(metrics)
        return metrics

    def save(self, tag: str, metric: float | None = None, state: dict | None = None) -> None:
        """Saves a checkpoint to resume from, a Hugging Face copy, or both, as `ckpt.*` says. `state`: the
        value of `self.state()` at the end of the step; None: the current one. With `ckpt.async_save` the
        checkpoint is still being written when this method returns."""
        self.finish_checkpoint()
        with self.observer.phase("save"), self.checkpoints.writing():
            if not self.config.ckpt.disable_ds:
                if self.critic:
                    self.critic.save_checkpoint(tag, {}).result()
                self.policy.save_checkpoint(tag, state or self.state()).result()
            if self.config.ckpt.save_hf:
                self.policy.export(f"{self.config.ckpt.folder}/{tag}{COPY}").result()
            self.observer.flush()  # a resumed run does not repeat these steps
        self.unfinished = tag, metric
        if not self.config.ckpt.async_save:
            self.finish_checkpoint()
        if not tag.startswith(BEST):
            self.saved_step = self.step

    def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and commits it. Raises RunError if
        it could not be written."""
        if self.unfinished is None:
            return
        (tag, metric), self.unfinished = self.unfinished, None
        with self.observer.phase("save"), self.checkpoints.saving(tag, metric):
            if self.config.ckpt.async_save:
                for pending in [model.finish_checkpoint() for model in self.trained]:
                    pending.result()

    @property
    def trained(self) -> list[TrainableRanks]:
        """The critic, if there is one, and the policy."""
        return [self.critic, self.policy] if self.critic else [self.policy]

    def state(self) -> dict:
        """Returns the state that a resumed run needs besides its models."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            "collector": self.collector.state_dict(),
            "kl_coef": self.kl.coef,
            "estimator": self.estimator.state_dict(),
            "best_metric": self.best_metric,
        }

    def sample_all(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """Samples the evaluation prompts. Returns the trajectories in the order of `prompts`."""
        groups = sample_all(self.rollout, prompts, "eval", self.config.rollout.timeout, self.on_group)
        return [t for group in groups for t in group.trajectories]

    def _keep_if_best(self, metrics: Metrics) -> None:
        """Saves a separate checkpoint if this evaluation is the best so far and the run saves checkpoints."""
        if self.config.ckpt.save_steps <= 0:
            return
        value = self._metric_of(metrics)
        if value is None:
            return
        if self.best_metric is None or value > self.best_metric:
            self.best_metric = value
            self.save(f"best_global_step{self.step}", value)

    def _metric_of(self, metrics: Metrics) -> float | None:
        """Returns the value of the metric that `ckpt.best_metric_key` names. Returns None if the key is
        "none", nothing was evaluated, or every sample of its source failed. Raises UsageError for an unknown
        metric."""
        key = self.config.ckpt.best_metric_key
        evaluated = sorted(name for name in metrics if name.startswith("eval/"))
        if key == "none" or not evaluated:
            return None
        asked = key.removeprefix("eval/") or f"{self.eval_sources[0]}_score_mean"
        names = (f"eval/{asked}", f"eval/{asked.removeprefix('eval_')}")  # older versions: eval_default_pass1
        names += tuple(as_scores(name) for name in names)
        name = next((name for name in names if name in metrics), names[1])
        failed = [source for source in self.eval_sources if f"eval/{source}_score_mean" not in metrics]
        if name in metrics or any(name.startswith(f"eval/{source}_") for source in failed):
            return metrics.get(name)
        text = f"no evaluation metric has this name; there are {', '.join(evaluated)}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--ckpt.best_metric_key", value=key)


def check_version(state: Mapping[str, Any]) -> None:
    """Raises UsageError if a later release of this package wrote the state."""
    if (version := state.get("version", 1)) > STATE_VERSION:
        text = (
            f"the checkpoint has version {version}, and this installation reads up to {STATE_VERSION}.\n"
            "Resume with the release that wrote it, or start a new run."
        )
        raise UsageError(ErrorCode.OTHER_RUN, text, flag="--ckpt.load_enable")


def with_outputs(
    batch: Batch,
    policy: ModelRanks | None,
    critic: ModelRanks | None,
    teacher: ModelRanks | None,
    reference: ModelRanks | None,
    step: int,
) -> Batch:
    """Returns the batch with the log-probs of policy, teacher and reference and the critic's values; it has
    no column of a model that is None. Raises RunError for an output that is not finite."""
    models = (policy, critic, teacher, reference)
    pending = [model.forward(batch) if model else None for model in models]
    answers = [p.result() if p else None for p in pending]
    check_finite(zip(("policy", "critic", "teacher", "reference model"), answers, strict=True), step)
    log_probs, values, of_teacher, of_reference = answers
    return replace(
        batch, log_probs=log_probs, values=values, teacher_log_probs=of_teacher, ref_log_probs=of_reference
    )


def check_finite(answers: Iterable[tuple[str, np.ndarray | None]], step: int) -> None:
    """Raises RunError if a model's output for any action is not finite. `answers`: (name of the model, its
    (A,) output)."""
    for model, answer in answers:
        if answer is not None and (bad := int((~np.isfinite(answer)).sum())):
            text = (
                f"step {step}: {bad} of {len(answer)} outputs of the {model} are not finite. Nothing was "
                "learned from them.\nLook at its weights and at the step's rollouts in the run folder."
            )
            raise RunError(ErrorCode.NOT_FINITE, text)


def restore(tag: str, policy: TrainableRanks, critic: TrainableRanks | None) -> dict:
    """Loads the models of a checkpoint and returns the trainer's `state` of that step."""
    if critic:
        critic.load_checkpoint(tag).result()
    return policy.load_checkpoint(tag).result()


def num_samples(trajectories: Sequence[Trajectory]) -> int:
    """Returns the number of episodes. An episode with several sequences counts once."""
    return sum(t.is_first for t in trajectories)
