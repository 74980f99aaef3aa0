"""Ranks of models in this process, and whole runs of RL with them.

Controller, groups and workers are the real ones. Ray's actors live in this process, and the engine behind
each rank computes nothing: it remembers the rows that it was given.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import trajectory
from torch import Tensor

from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.cluster import actors, pending, rank_groups
from openrlhf.cluster.engine_memory import ExclusiveDevices
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.rank_groups import CriticRanks, FrozenRanks, PolicyRanks, RankGroup
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
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.loop.rl import PPOTrainer
from openrlhf.mesh import Mesh
from openrlhf.observability.hooks.base import Hook, Step
from openrlhf.rows import ExperienceRow, PackedRow
from openrlhf.tools.selftest.step_checks import StepChecks
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.saving import restore
from openrlhf.training.schedule import prompts_of_steps, training_schedule
from openrlhf.types import Batch, Metrics, Prompt, PromptGroup, Purpose, Schedule, Trajectory

NUM_SAMPLES = 2
"""Samples of each prompt."""


class Handle:
    """Handle of a worker whose methods run at once; it records what was sent to the worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.sent: list[tuple[str, tuple]] = []
        self._actor_id = SimpleNamespace(hex=lambda: "00")

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*args):
            self.sent.append((args[0], args[2 : 2 + args[1]]) if name == "call" else (name, args))
            return getattr(self.worker, name)(*args)

        return SimpleNamespace(remote=remote)


@dataclass
class Engine:
    """One rank of a model. Its log-prob (or value) of an action is that token's number times `slope`."""

    slope: float = 0.0
    shares_prefixes = trains_on_prefixes = False
    merged_fraction: float | None = None
    asked: list[list[PackedRow]] = field(default_factory=list)
    """Rows of each forward."""
    learned: list[list[ExperienceRow]] = field(default_factory=list)
    """Rows of each optimizer step."""
    dies_at: str = ""
    """Checkpoint during whose writing it dies."""

    @property
    def steps(self) -> int:
        return len(self.learned)

    def forward(self, rows: Sequence[PackedRow], read: Callable) -> list[Tensor]:
        self.asked.append(list(rows))
        return [row.token_ids[row.action_mask] * self.slope for row in rows]

    def train_step(self, rows: Sequence[ExperienceRow], objective: Callable) -> Metrics:
        self.learned.append(list(rows))
        for row in rows:  # `forward` answers the same
            if isinstance(objective, PolicyObjective) and objective.seen is not None:
                known, numbers = row.old_log_probs, row.row.token_ids[row.row.action_mask]
                objective.seen.append(numbers.float() if known is None else known)
        return {"policy/loss": 0.0}

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None:
        path = Path(folder) / tag
        path.mkdir(parents=True, exist_ok=True)
        if tag == self.dies_at:
            raise OSError("the disk is full")
        (path / "state").write_bytes(pickle.dumps(state))

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        return pickle.loads((Path(folder) / tag / "state").read_bytes())


def start_ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes groups of ranks start their workers in this process, without Ray."""

    def remote(worker_class: type) -> SimpleNamespace:
        actor = SimpleNamespace(remote=lambda *args: Handle(worker_class(*args)))
        return SimpleNamespace(options=lambda **options: actor)

    monkeypatch.setattr(rank_groups.ray, "remote", remote)
    monkeypatch.setattr(rank_groups, "results", list)
    monkeypatch.setattr(pending, "results", list)
    monkeypatch.setattr(actors, "start_heartbeat", lambda progress: None)  # it would start Ray


def group_of(group_class: type, config: PPOConfig, ranks: int | Mesh, slope: float = 0.0, **options) -> Any:
    mesh = ranks if isinstance(ranks, Mesh) else Mesh(data=ranks)
    bundles = Bundles(None, mesh, ExclusiveDevices(shared=False), ["00" * 28] * mesh.size)
    made = group_class(config, bundles, **options)
    for handle in made.workers:
        handle.worker.model, handle.worker.total_steps = Engine(slope=slope), 10
    return made


def engines_of(models: RankGroup) -> list[Engine]:
    return [handle.worker.model for handle in models.workers]


def sample_of(length: int, number: int = 0) -> Trajectory:
    """Returns a sample whose first token is its `number`; all other tokens are actions."""
    return trajectory(token_ids=[number, *range(1, length)])


def schedule_of(batch: Batch, num_batches: int, num_ranks: int) -> Schedule:
    lengths = batch.lengths.tolist()
    return training_schedule(
        lengths, range(len(lengths)), num_batches=num_batches, epochs=1, num_ranks=num_ranks, seed=()
    )


def numbers_of(batch: Batch) -> list[int]:
    return batch.token_ids[batch.lengths.cumsum() - batch.lengths].tolist()


def numbers_in(rows: Sequence[PackedRow]) -> list[int]:
    """Returns the numbers of the samples with actions: those of stand-ins are not counted."""
    return [
        int(sequence[0])
        for row in rows
        for sequence, actions in zip(row.token_ids.split(row.lengths), row.num_actions, strict=True)
        if actions > 0
    ]


def learned_in(step: Sequence[ExperienceRow]) -> list[int]:
    return numbers_in([row.row for row in step])


class Silent(Hook):
    """Observer that discards everything."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        yield

    def ended(self, step: Step) -> None:
        assert all(math.isfinite(value) for value in step.metrics.values()), step.metrics

    def message(self, text: str) -> None:
        pass

    def advance(self, count: int) -> None:
        pass


Opinion = Callable[[int, int], Sequence[float | None]]
"""Function (epoch, prompt) -> the reward of each of its samples, None for a failed one."""


@dataclass
class Run:
    """Whole run whose `opinion` and `evaluation` (version -> score) are given."""

    config: PPOConfig
    num_prompts: int
    opinion: Opinion
    evaluation: Callable[[int], float] = lambda version: 0.0
    num_ranks: int = 1
    resume: bool = False
    version: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Epoch and number of each prompt, in the order of sampling."""
    under_way: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        prompts = PromptDataset([Prompt(prompt_id=i, text="the same") for i in range(self.num_prompts)])
        self.policy = group_of(PolicyRanks, config, self.num_ranks, slope=-0.1)
        critic = group_of(CriticRanks, config, self.num_ranks) if config.uses_critic else None
        others = [f"{config.ckpt.path}/_critic"] if config.uses_critic else []
        checkpoints = CheckpointFolder(f"{config.ckpt.path}/_actor", config.ckpt, others)
        tag = checkpoints.find().tag if self.resume else None
        self.trainer = PPOTrainer(
            config=config,
            rollout=self,
            policy=self.policy,
            reference=group_of(FrozenRanks, config, 1) if config.uses_reference else None,
            critic=critic,
            prompts=PromptSampler(prompts, seed=3, num_epochs=config.train.num_episodes),
            eval_prompts=[Prompt(prompt_id=0, text="held out")] if config.eval.dataset else [],
            checkpoints=checkpoints,
            observer=(silent := Silent()),
            hooks=[StepChecks(config=config), silent],
            kl=KLController(coef=config.algo.kl.init_coef, target=config.algo.kl.target, horizon=100),
            total_steps=len(prompts_of_steps(config, self.num_prompts)),
            restored=restore(tag, self.policy, critic) if tag else None,
        )

    def sync(self, policy: PolicyRanks, version: int) -> SimpleNamespace:
        self.version = version
        return SimpleNamespace(result=dict)

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.under_way += prompts
        if purpose == "train":
            self.asked += [(p.epoch, p.prompt_id) for p in prompts]

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """Returns the group that was asked for last."""
        prompt = self.under_way.pop()
        if purpose == "train":
            rewards = self.opinion(prompt.epoch, prompt.prompt_id)
        else:
            rewards = [self.evaluation(self.version)] * 2
        return PromptGroup(
            prompt=prompt, trajectories=[self.sampled(prompt, i, r) for i, r in enumerate(rewards)]
        )

    def sampled(self, prompt: Prompt, i: int, reward: float | None) -> Trajectory:
        count = 1 + (prompt.prompt_id + 2 * i) % 4
        return trajectory(
            reward,
            prompt=prompt,
            sample_index=i,
            token_ids=[self.number_of(prompt.epoch, prompt.prompt_id, i), *range(1, count + 1)],
            rollout_log_probs=[0.0] * count,
            versions=[self.version] * count,
        )

    def number_of(self, episode: int, prompt_id: int, i: int) -> int:
        return (episode * self.num_prompts + prompt_id) * NUM_SAMPLES + i

    def learned(self, models: RankGroup) -> list[list[list[int]]]:
        """Returns [optimizer step][rank] -> numbers of samples."""
        ranks = [[learned_in(step) for step in engine.learned] for engine in engines_of(models)]
        return [list(step) for step in zip(*ranks, strict=True)]


def in_order(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return sorted(number for step in steps for rank in step for number in rank)


def config_of(
    path: Path | str = "unused",
    *,
    batch: int = 2,
    at_a_time: int | None = None,
    train_batch: int = 4,
    filters: bool = False,
    estimator: str = "rloo",
    kl: KLConfig | None = None,
    freezing_steps: int = -1,
    save_steps: int = -1,
    evaluated: bool = False,
    **train,
) -> PPOConfig:
    return PPOConfig(
        rollout=RolloutConfig(
            batch_size=batch, vllm_generate_batch_size=at_a_time, n_samples_per_prompt=NUM_SAMPLES
        ),
        train=TrainConfig(batch_size=train_batch, verify_steps=0, **train),
        algo=AlgoConfig(
            advantage=AdvantageConfig(estimator=estimator),
            kl=kl or KLConfig(init_coef=0.0),
            dynamic_filtering_enable=filters,
            dynamic_filtering_max_batches=1000,
            max_mismatch=math.inf,  # the policy's log-prob of a sample is its number
        ),
        critic=CriticConfig(freezing_steps=freezing_steps),
        reward=RewardConfig(max_failed_ratio=1.0),
        eval=EvalConfig(
            dataset="held_out" if evaluated else None, steps=1 if evaluated else -1, n_samples_per_prompt=2
        ),
        ckpt=PPOCkptConfig(path=str(path), save_steps=save_steps, max_num=100),
    )
