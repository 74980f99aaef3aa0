"""The single controller of PPO and its relatives."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from openrlhf.algos.kl import KLController
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import is_due
from openrlhf.datasets.sampler import PromptSampler
from openrlhf.engine.interfaces import ModelGroup, Rollout, TrainableGroup
from openrlhf.observe.observer import Observer
from openrlhf.trainer.checkpoints import CheckpointFolder
from openrlhf.trainer.credit import assign_credit
from openrlhf.trainer.evaluate import evaluation_metrics
from openrlhf.trainer.schedule import num_batches
from openrlhf.types import Experience, Metrics, Prompt, Sample, Scores, Trajectory, present


@dataclass(kw_only=True)
class PPOTrainer:
    """Decides what happens next. Holds no device, and knows neither Ray nor vLLM nor DeepSpeed."""

    config: PPOConfig
    rollout: Rollout
    policy: TrainableGroup
    reference: ModelGroup | None
    """None where the KL coefficient needs no reference."""
    teacher: ModelGroup | None = None
    """None without on-policy distillation."""
    prompts: PromptSampler
    eval_prompts: Sequence[Prompt]
    """Empty without evaluation."""
    checkpoints: CheckpointFolder
    observer: Observer = field(init=False)
    """Opened once it is known which step the run resumes from."""
    kl: KLController
    total_steps: int
    """RL steps of the whole run."""
    step: int = 0
    """RL steps done; the version of the policy's weights."""
    best_metric: float | None = field(default=None, init=False)

    def fit(self) -> None:
        """Generate, score, credit, update, sync, evaluate, log, save."""
        self.rollout.load_weights(self.policy, self.step).result()
        if self.step == 0 and self.is_eval_due:
            self.observer.log_step(0, self.evaluate())
        while self.step < self.total_steps:
            prompts = self.prompts.next_batch(self.config.rollout.batch_size)
            num_samples = len(prompts) * self.config.rollout.n_samples_per_prompt
            with self.observer.phase("generate", total=num_samples):
                trajectories = self.rollout.generate(prompts).result()
            metrics = self.train_on(trajectories)
            self.step += 1
            with self.observer.phase("sync"):
                self.rollout.load_weights(self.policy, self.step).result()
            if self.is_eval_due:
                metrics |= self.evaluate()
            self.observer.log_step(self.step, metrics)
            if is_due(self.step, self.config.ckpt.save_steps):
                self.save(f"global_step{self.step}", self._metric_of(metrics))

    @property
    def is_eval_due(self) -> bool:
        """Before the first step, after every `eval.steps` steps, and after the last one."""
        steps = self.config.eval.steps
        if not self.eval_prompts or steps <= 0:
            return False
        return is_due(self.step, steps) or self.step == self.total_steps

    def train_on(self, trajectories: list[Trajectory]) -> Metrics:
        """Score what was sampled, assign credit, update."""
        self.observer.log_rollouts(self.step + 1, trajectories)
        finished = self.check(trajectories)
        samples = [Sample.of(t) for t in finished]
        with self.observer.phase("score"):
            scores = self.score(samples)
        result = assign_credit(
            samples,
            scores,
            finished,
            algo=self.config.algo,
            reward=self.config.reward,
            kl_coef=self.kl.coef,
            max_new_tokens=self.config.longest_response,
            teacher_coef=self.config.teacher.kd_coef,
        )
        experiences = [
            Experience(sample=s, scores=sc, credit=c)
            for s, sc, c in zip(samples, scores, result.credit, strict=True)
        ]
        with self.observer.phase("update"):
            batches = num_batches(len(trajectories), self.config.train.batch_size)
            updated = self.policy.update(experiences, batches, self.kl.coef).result()
        metrics = rollout_metrics(trajectories) | result.metrics | updated
        self.kl = self.kl.update(metrics["kl/mean"], len(finished))
        return metrics

    def score(self, samples: list[Sample]) -> list[Scores]:
        """Ask every model what it thinks of the samples."""
        log_probs = self.policy.forward(samples)
        others = [
            model.forward(samples).result() if model else [None] * len(samples)
            for model in (self.reference, self.teacher)
        ]
        return [
            Scores(log_probs=p, ref_log_probs=r, teacher_log_probs=t)
            for p, r, t in zip(log_probs.result(), *others, strict=True)
        ]

    def check(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Those that can be trained on. Raises RuntimeError where too many failed."""
        finished = [t for t in trajectories if t.ok]
        failed = [t for t in trajectories if not t.ok]
        limit = self.config.reward.max_failed_ratio
        if not finished or len(failed) > limit * len(trajectories):
            common, count = Counter(t.error for t in failed).most_common(1)[0]
            raise RuntimeError(
                f"step {self.step + 1}: {len(failed)} of {len(trajectories)} samples failed, more than "
                f"--reward.max_failed_ratio {limit:g} allows. {count} of them with:\n{common}"
            )
        return finished

    def evaluate(self) -> Metrics:
        num_samples = len(self.eval_prompts) * self.config.eval.n_samples_per_prompt
        with self.observer.phase("evaluate", total=num_samples):
            trajectories = self.rollout.evaluate(self.eval_prompts).result()
        metrics = evaluation_metrics(trajectories)
        self.observer.log_rollouts(self.step, trajectories, name="eval")
        self._keep_if_best(metrics)
        return metrics

    def save(self, tag: str, metric: float | None = None) -> None:
        """A checkpoint to resume from, or a Hugging Face copy, or both, as `ckpt.*` says."""
        with self.observer.phase("save"):
            if not self.config.ckpt.disable_ds:
                self.policy.save_checkpoint(tag, self.state()).result()
                self.checkpoints.completed(tag, metric)
            if self.config.ckpt.save_hf:
                self.policy.export(f"{self.config.ckpt.path}/{tag}_hf").result()

    def state(self) -> dict:
        """Everything that a run must remember beside its models."""
        return {
            "step": self.step,
            "prompts": self.prompts.state_dict(),
            "kl_coef": self.kl.coef,
            "best_metric": self.best_metric,
        }

    def resume(self, tag: str) -> None:
        state = self.policy.load_checkpoint(tag).result()
        self.step, self.best_metric = state["step"], state["best_metric"]
        self.prompts.load_state_dict(state["prompts"])
        self.kl = replace(self.kl, coef=state["kl_coef"])

    def _keep_if_best(self, metrics: Metrics) -> None:
        """A checkpoint of its own for the best evaluation so far. Only runs that save checkpoints have
        one."""
        value = self._metric_of(metrics)
        if value is None or self.config.ckpt.save_steps <= 0:
            return
        if self.best_metric is None or value > self.best_metric:
            self.best_metric = value
            self.save(f"best_global_step{self.step}", value)

    def _metric_of(self, metrics: Metrics) -> float | None:
        """What `ckpt.best_metric_key` names; None where it names nothing, or nothing was evaluated."""
        key = self.config.ckpt.best_metric_key
        evaluated = sorted(name for name in metrics if name.startswith("eval/"))
        if key == "none" or not evaluated:
            return None
        if not key:
            return next((metrics[name] for name in evaluated if name.endswith("_pass1")), None)
        for name in (key, f"eval/{key}"):
            if name in metrics:
                return metrics[name]
        raise ValueError(f"--ckpt.best_metric_key {key}: no such metric; there are {', '.join(evaluated)}")


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """What was sampled, failures included; means are over samples that did not fail, of which there is
    one."""
    finished = [t for t in trajectories if t.ok]
    rewards = [present(t.reward) for t in finished]
    metrics = {
        "rollout/reward_mean": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        "rollout/score_mean": fmean(present(t.score) for t in finished),
        "rollout/response_length_mean": fmean(t.num_actions for t in finished),
        "rollout/total_length_mean": fmean(len(t.token_ids) for t in finished),
        "rollout/truncated_rate": fmean(t.truncated for t in finished),
        "rollout/num_samples": float(len(trajectories)),
        "rollout/failed_ratio": 1 - len(finished) / len(trajectories),
    }
    for outcome, count in Counter(t.outcome for t in trajectories if not t.ok).items():
        metrics[f"rollout/{outcome.value}_count"] = float(count)
    for name in sorted({name for t in finished for name in t.extra_logs}):
        metrics[f"rollout/{name}"] = fmean(t.extra_logs[name] for t in finished if name in t.extra_logs)
    return metrics
