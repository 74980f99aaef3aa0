"""The loop of reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their relatives.

Each step samples answers to some prompts with the current weights pi_old, scores them, and maximizes

    E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ],  r = pi(action | state) / pi_old(action | state)

over the actions of the answers (https://arxiv.org/abs/1707.06347). The estimator of the advantages A makes
the algorithm: it comes from `algorithms/advantages`, the loss from `algorithms/policy_losses`. Everything
that watches a run is a hook (observability/hooks): its checks, its record, and users' own.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Generic, NoReturn, TypeVar

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.algorithms.kl import KLController
from openrlhf.backends.base import ModelRanks, Rollout, TrainableRanks
from openrlhf.backends.finite import NotFiniteError
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import is_due
from openrlhf.data.prompt_sampler import PromptDataset, PromptDraws, PromptSampler
from openrlhf.observability.hooks.base import Evaluation, Hook, Step, announce, announcing_end
from openrlhf.observability.observer import Observer
from openrlhf.stopping import Dropped, Stop
from openrlhf.training.advantages import advantage_arguments, compute_advantages, log_prob_metrics
from openrlhf.training.collect import Collector, check_collected, num_samples, sample_all
from openrlhf.training.evaluate import best_metric, evaluation_metrics
from openrlhf.training.outputs import begin_forward, with_outputs
from openrlhf.training.saving import STATE_VERSION, SavedRanks, Saver, check_version
from openrlhf.training.schedule import build_schedule, trained_on
from openrlhf.types import Batch, Metrics, Prompt, PromptGroup, Trajectory, Updated

# bounded .result(): the cluster's watchdog ends calls to processes that make no progress.

PolicyT = TypeVar("PolicyT", bound=TrainableRanks)


@dataclass(kw_only=True)
class PPOTrainer(Generic[PolicyT]):
    """Runs the loop. It uses no GPU itself, and does not depend on Ray, vLLM or DeepSpeed."""

    config: PPOConfig
    rollout: Rollout[PolicyT]
    policy: PolicyT
    reference: ModelRanks | None
    """None if there is no KL penalty or loss."""
    teacher: ModelRanks | None = None
    """None without on-policy distillation."""
    critic: TrainableRanks | None = None
    """None for estimators without a critic."""
    prompts: InitVar[PromptSampler | PromptDraws]
    eval_prompts: PromptDataset | Sequence[Prompt]
    """Empty without evaluation."""
    checkpoints: CheckpointFolder
    observer: Observer
    hooks: Sequence[Hook] = ()
    """All that listen to the events of the loop, in this order."""
    kl: KLController
    total_steps: int
    """Number of RL steps of the whole run."""
    restored: InitVar[dict | None] = None
    """The `state` of a checkpoint to resume from, as returned by `restore`; None for a new run."""
    step: int = field(default=0, init=False)
    """Number of RL steps done."""
    optimizer_steps: int = field(default=0, init=False)
    """Number of optimizer steps of the policy."""
    stop: Stop = field(default_factory=Stop, init=False)
    best_metric: float | None = field(default=None, init=False)
    """Largest value of `ckpt.best_metric_key` so far."""
    eval_sources: list[str] = field(default_factory=list, init=False)
    """Sources of the prompts in the last evaluation."""
    collector: Collector = field(init=False)
    estimator: AdvantageEstimator = field(init=False)
    saver: Saver = field(init=False)

    def __post_init__(self, prompts: PromptSampler | PromptDraws, restored: dict | None) -> None:
        self.collector = Collector(self.config, prompts, self.rollout, self.advance)
        self.estimator = self.config.algo.build_estimator()
        models, phase = SavedRanks(self.critic, self.policy), self.observer.phase
        self.saver = Saver(checkpoints=self.checkpoints, models=models, phase=phase, hooks=self.hooks)
        if restored is not None:
            self.load_state(restored)

    def fit(self) -> None:
        """Runs the loop to its end. On a request to stop, saves a checkpoint at a step boundary and raises
        Stopped. Samples of the next step are dropped; a resumed run samples them again."""
        boundary, only = self.state(), self.config.eval.eval_only
        try:
            with self.stop.dropping():
                self.rollout.sync(self.policy, self.weight_version).result()
                if self.is_eval_due and (self.step == 0 or only):
                    about = {"number": self.step, "version": self.weight_version}
                    announce(self.hooks, Hook.ended, Step(**about, metrics=self.evaluate()))
            while self.step < self.total_steps and not only:
                boundary = self.state()
                with self.stop.dropping():
                    step = self.collect()
                if not step.samples:
                    self.end_early(step)
                    break
                self.train_step(step)
                del step  # the next one is collected without its batch in memory
        except Dropped:
            self.end_at_boundary(boundary)
        except NotFiniteError:
            self.saver.finish()
            raise
        self.saver.finish()

    def collect(self) -> Step:
        """Samples answers to the next prompts, and filters them. Asynchronous runs have sampled ahead."""
        staleness_limit = self.collector.staleness_limit
        ahead = staleness_limit.may_exceed or staleness_limit.max_staleness
        total = None if ahead else self.config.samples_per_step
        step = Step(
            number=self.step + 1,
            version=self.weight_version,
            kl=self.kl,
            optimizer_steps=self.optimizer_steps,
            assign_advantages=self.assign_advantages,
        )
        with self.observer.phase("generate", total):
            self.collector.fill(step)
        return step

    def train_step(self, step: Step) -> None:
        """Trains on the samples, syncs, evaluates, logs and saves."""
        if self.collector.is_exhausted:
            self.total_steps = step.number
        with announcing_end(self.hooks, Hook.trained, step):
            check_collected(self.config, step)
            announce(self.hooks, Hook.sampled, step)
            self.learn(step)
        self.step += 1
        with self.observer.phase("sync"):
            step.metrics |= self.rollout.sync(self.policy, self.weight_version).result()
            announce(self.hooks, Hook.synced, step)
        if self.is_eval_due:
            step.metrics |= self.evaluate()
        announce(self.hooks, Hook.ended, step)
        if self.saver.is_due(self.step):
            self.saver.save(self.step, self.state(), self.find_metric(step.metrics))
        else:
            self.saver.finish_if_written()
        if self.stop.is_requested:
            self.end_at_boundary(self.state(), self.find_metric(step.metrics))

    def learn(self, step: Step) -> None:
        """Computes log-probs and advantages, and updates the models."""
        finished = step.finished
        with self.observer.phase("logprobs"):
            policy = None if self.config.skips_old_log_probs else self.policy
            models = (policy, self.critic, self.teacher, self.reference)
            batch = Batch.of(finished, step.version, **self.config.batch_columns)
            passes = begin_forward(batch, models)
            announce(self.hooks, Hook.scoring, step)
            step.batch = with_outputs(batch, passes, step.number)
        announce(self.hooks, Hook.scored, step)

        step.batch, metrics = self.assign_advantages(step.batch, finished)
        step.metrics |= metrics
        announce(self.hooks, Hook.advantages, step)

        step.batch = batch = replace(step.batch, teacher_log_probs=None)  # advantages contain them
        step.groups = [t.group for t in finished] if self.config.train.shuffle == "group" else None
        step.trained_on = trained_on(step, with_truncated=not self.config.rollout.mask_truncated)
        for name, model in self.trained_models.items():
            routed = name == "policy"
            step.schedules[name] = build_schedule(
                self.config, model, batch, step.trained_on, step.num_samples, step.groups, routed=routed
            )
        announce(self.hooks, Hook.scheduled, step)

        with self.observer.phase("update"):
            step.updated = updated = self.update(batch, step)
        step.metrics |= updated.metrics
        if updated.log_probs is not None:  # of the first optimizer step, before any change of the policy
            first = replace(batch.select(updated.first), log_probs=updated.log_probs)
            step.metrics |= log_prob_metrics(first, self.config.algo.kl.estimator)
            if len(first) == len(batch):
                in_order = batch.put_together([updated.first], [updated.log_probs])
                step.batch = replace(batch, log_probs=in_order)
        announce(self.hooks, Hook.updated, step)

        self.optimizer_steps += len(step.schedules.get("policy", []))
        if self.policy_learns:
            self.kl = self.kl.update(step.metrics.get("kl/mean", 0.0), sum(t.is_first for t in finished))

    def assign_advantages(self, batch: Batch, finished: Sequence[Trajectory]) -> tuple[Batch, Metrics]:
        arguments = advantage_arguments(self.config, self.kl.coef)
        return compute_advantages(batch, finished, estimator=self.estimator, **arguments)

    def update(self, batch: Batch, step: Step) -> Updated:
        """Takes the optimizer steps of all models that learn, in parallel if they have separate GPUs."""
        pending = [
            model.update(batch, step.schedules[name], step.kl.coef)
            for name, model in self.trained_models.items()
        ]
        updated = [update.result() for update in pending]
        metrics = {name: value for of_model in updated for name, value in of_model.metrics.items()}
        return updated[-1]._replace(metrics=metrics)  # the policy comes last

    def evaluate(self) -> Metrics:
        """Samples the evaluation prompts, and returns the `eval/...` metrics. Saves a checkpoint if the
        evaluation is the best so far and the run saves checkpoints."""
        total = len(self.eval_prompts) * self.config.eval.n_samples_per_prompt
        prompts, timeout = list(self.eval_prompts), self.config.rollout.timeout  # reads their images once
        with self.observer.phase("evaluate", total=total):
            groups = sample_all(self.rollout, prompts, "eval", timeout, self.advance)
        samples = [t for group in groups for t in group.trajectories]
        self.eval_sources = sorted({t.prompt.source for t in samples})
        metrics = evaluation_metrics(samples)
        about = {"step": self.step, "version": self.weight_version}
        announce(self.hooks, Hook.evaluated, Evaluation(**about, samples=samples, metrics=metrics))
        saves = self.config.ckpt.save_steps > 0 and not self.config.eval.eval_only
        value = self.find_metric(metrics) if saves else None
        if value is not None and (self.best_metric is None or value > self.best_metric):
            self.best_metric = value
            self.saver.save(self.step, self.state(), value, best=True)
        return metrics

    def end_early(self, step: Step) -> None:
        """Ends the run if filtering rejected all remaining prompts."""
        announce(self.hooks, Hook.trained, step)
        self.observer.message(f"no prompt is left for step {step.number} of {self.total_steps}")
        is_evaluated, self.total_steps = self.is_eval_due, self.step
        if self.is_eval_due and not is_evaluated:
            last = Step(number=self.step, version=self.weight_version, metrics=self.evaluate())
            announce(self.hooks, Hook.ended, last)

    def end_at_boundary(self, state: dict, metric: float | None = None) -> NoReturn:
        """Saves a checkpoint of the last step, unless there is one, and raises Stopped. `state`: the value of
        `self.state()` at the end of that step."""
        if self.step and self.saver.step != self.step:
            self.saver.save(self.step, state, metric)
        self.saver.finish()
        raise self.stop.at_boundary(saved=self.step > 0)

    @property
    def is_eval_due(self) -> bool:
        """True before the first step, after every `eval.steps` steps and after the last one."""
        own, steps = self.config.eval, self.config.eval.steps
        is_asked = own.eval_only or (own.eval_at_start and self.step == 0)
        due = steps > 0 and (is_due(self.step, steps) or self.step == self.total_steps)
        return bool(self.eval_prompts) and (is_asked or due)

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
    def trained_models(self) -> dict[str, TrainableRanks]:
        """The models that the next update trains, the policy last."""
        critic = {"critic": self.critic} if self.critic else {}
        return critic | ({"policy": self.policy} if self.policy_learns else {})

    def advance(self, group: PromptGroup) -> None:
        self.observer.advance(num_samples(group.trajectories))

    def find_metric(self, metrics: Metrics) -> float | None:
        return best_metric(self.config.ckpt.best_metric_key, metrics, self.eval_sources)

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

    def load_state(self, state: dict) -> None:
        """Restores a `state`. What a fork has changed begins anew."""
        check_version(state)
        self.step = self.saver.step = state["step"]
        changed = self.checkpoints.changed
        if changed is None:  # the best checkpoint of a fork is one of its own
            self.best_metric = state["best_metric"]
        self.optimizer_steps = state.get("optimizer_steps", 0)
        if self.checkpoints.fork.get("data_from") != self.step:
            self.collector.load_state_dict(state["collector"], again=bool(changed))
        if any(flag.startswith("--algo.") for flag in changed or ()):
            return
        self.kl = replace(self.kl, coef=state["kl_coef"])
        if estimator := state.get("estimator"):  # older checkpoints have none
            self.estimator.load_state_dict(estimator)
