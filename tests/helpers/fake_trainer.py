"""A trainer of RL whose groups answer at once and remember their requests."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from records import record_of, trajectory

from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoint.folder import UNFINISHED, CheckpointFolder
from openrlhf.config.ppo import (
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    EvalConfig,
    KLConfig,
    PPOCkptConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from openrlhf.config.sections import LoggerConfig
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.loop.rl import PPOTrainer
from openrlhf.observability.hooks.base import Hook
from openrlhf.observability.hooks.memory import PhaseMemory
from openrlhf.observability.observer import Observer
from openrlhf.observability.progress import Progress
from openrlhf.observability.rollout_metrics import RolloutMetrics
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tools.selftest.step_checks import StepChecks
from openrlhf.training.saving import restore
from openrlhf.types import Batch, Prompt, PromptGroup, Purpose, Schedule, Trajectory, Updated

PROMPTS = [Prompt(prompt_id=i, text=f"prompt {i}") for i in range(8)]
EVAL_PROMPTS = [Prompt(prompt_id=i, text=f"held out {i}", source="math") for i in range(2)]
LOG_PROB, REF_LOG_PROB, VALUE = -1.0, -1.5, 0.5


class Done:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


class Rollout:
    """Rollout that finishes the latest request first. `reward(prompt, sample_index)` gives the reward, or
    None if the sample failed; `score(prompt, version)` is the policy's score in evaluation."""

    def __init__(
        self, calls: list, reward=lambda prompt, i: float(i), score=lambda prompt, version: 0.5
    ) -> None:
        self.calls, self.reward, self.score = calls, reward, score
        self.version = -1
        self.truncated: set[int] = set()
        self.under_way: dict[Purpose, list[Prompt]] = {"train": [], "eval": []}

    def sync(self, policy, version: int) -> Done:
        self.calls.append(f"sync {version}")
        self.version = version
        return Done({})

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.calls.append(f"generate {[p.prompt_id for p in prompts]}" if purpose == "train" else "evaluate")
        self.under_way[purpose] += prompts

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        prompt = self.under_way[purpose].pop()
        if purpose == "train":
            rewards = [self.reward(prompt, i) for i in range(2)]
        else:
            rewards = [self.score(prompt, self.version)] * 2
        return PromptGroup(
            prompt=prompt, trajectories=[self.sampled(prompt, i, r) for i, r in enumerate(rewards)]
        )

    def sampled(self, prompt: Prompt, i: int, reward: float | None) -> Trajectory:
        return trajectory(
            reward,
            [2, 3, 4][: 2 + i],
            prompt=prompt,
            sample_index=i,
            rollout_log_probs=[LOG_PROB] * (2 + i),
            versions=[self.version] * (2 + i),
            truncated=i in self.truncated,
        )


class Model:
    def __init__(self, calls: list, name: str, log_prob: float) -> None:
        self.calls, self.name, self.log_prob = calls, name, log_prob

    def forward(self, batch: Batch) -> Done:
        self.calls.append(f"{self.name} {len(batch)}")
        return Done(np.full(batch.num_actions.sum(), self.log_prob, np.float32))


class Trained(Model):
    data_parallel_size = 2

    def __init__(self, calls: list, folder: Path, name: str = "policy", log_prob: float = LOG_PROB) -> None:
        super().__init__(calls, name, log_prob)
        self.folder = folder
        self.updates: list[tuple[Batch, Schedule, float]] = []
        self.num_updates = 0
        self.saved: dict[str, dict] = {}

    def update(self, batch: Batch, schedule: Schedule, kl_coef: float, is_fresh: bool = True) -> Done:
        self.calls.append(f"update {self.name} {len(batch)}")
        self.updates.append((batch, schedule, kl_coef))
        self.num_updates += 1
        first = [i for mini_batch in schedule[0] for i in mini_batch]
        log_probs = np.full(int(batch.num_actions[first].sum()), self.log_prob, np.float32)
        is_known = batch.log_probs is not None or self.name != "policy"
        return Done(Updated({f"{self.name}/loss": 0.25}, first, None if is_known else log_probs))

    def save_checkpoint(self, tag: str, state: dict) -> Done:
        self.calls.append(f"save {self.name} {tag}")
        (self.folder / UNFINISHED / tag).mkdir(parents=True)
        self.saved[tag] = copy.deepcopy(state) | {"num_updates": self.num_updates}
        return Done()

    def has_written(self) -> Done:
        return Done(True)

    def finish_checkpoint(self) -> Done:
        return Done()

    def load_checkpoint(self, tag: str) -> Done:
        self.calls.append(f"resume {self.name} {tag}")
        self.num_updates = self.saved[tag]["num_updates"]
        return Done(self.saved[tag])

    def export(self, folder: str) -> Done:
        self.calls.append(f"export {Path(folder).name}")
        return Done()


def config_of(path: Path, **ckpt) -> PPOConfig:
    return PPOConfig(
        rollout=RolloutConfig(batch_size=2, n_samples_per_prompt=2),
        train=TrainConfig(batch_size=4, verify_steps=0),  # the stand-ins differ from each other
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0.1)),
        eval=EvalConfig(dataset="held_out.jsonl", steps=2, n_samples_per_prompt=2),
        reward=RewardConfig(max_failed_ratio=0.5),
        ckpt=PPOCkptConfig(path=str(path / "ckpt"), **ckpt),
    )


def trainer_of(
    path: Path,
    config: PPOConfig,
    *,
    total_steps: int = 3,
    eval_prompts: Sequence[Prompt] = EVAL_PROMPTS,
    resume: str | None = None,
    saved: dict | None = None,
    critic: Trained | None = None,
    prompts: PromptSampler | None = None,
    fork: dict | None = None,
    hooks: Sequence[Hook] = (),
    **rollout,
) -> PPOTrainer:
    calls: list[str] = []
    policy = Trained(calls, path / "ckpt")
    policy.saved = saved or {}
    critic = critic or (Trained(calls, path / "critic", "critic", VALUE) if config.uses_critic else None)
    restored = restore(resume, policy, critic) if resume else None
    done = restored["step"] if restored else 0
    folder = RunFolder.create(path / "run", config_yaml="{}", argv=["test"], resume=resume is not None)
    observer = Observer(folder, LoggerConfig(), resume_step=done if restored else None)
    observer.progress = Progress(show=False)
    observer.start(total_steps, done=done)
    checkpoints = CheckpointFolder(str(config.ckpt.path), config.ckpt)
    if fork:
        checkpoints.fork, checkpoints.changed = fork, fork["changed"]
    return PPOTrainer(
        config=config,
        rollout=Rollout(calls, **rollout),
        policy=policy,
        reference=Model(calls, "reference", REF_LOG_PROB) if config.uses_reference else None,
        critic=critic,
        prompts=prompts or PromptSampler(PromptDataset(PROMPTS), seed=1, num_epochs=4),
        eval_prompts=eval_prompts,
        checkpoints=checkpoints,
        observer=observer,
        kl=KLController(coef=config.algo.kl.init_coef, target=config.algo.kl.target),
        total_steps=total_steps,
        hooks=[
            StepChecks(config=config),
            PhaseMemory(take=lambda: Done({"memory/update_gb": 0.5})),
            RolloutMetrics(),
            observer,
            *hooks,
        ],
        restored=restored,
    )


def fit(trainer: PPOTrainer) -> None:
    """Trains to the end, and until the journal is written."""
    trainer.fit()
    record_of(trainer.observer).journal.close()


def metrics_of(path: Path) -> dict[int, dict[str, float]]:
    return read_metrics(path / "run" / "metrics.jsonl")


def with_critic(path: Path, **critic) -> PPOConfig:
    config = config_of(path, save_steps=2, best_metric_key="none")
    algo = replace(config.algo, advantage=AdvantageConfig(estimator="gae"))
    return replace(config, algo=algo, critic=CriticConfig(**critic))
