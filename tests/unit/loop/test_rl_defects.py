"""Defects that reinforcement learning frameworks were seen to have: each test fails where its defect is.

Controller, groups and workers are the real ones. Ray's actors live in this process, and the engine behind
each rank computes nothing: it remembers the rows that it was given.
"""

import asyncio
import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from architectures import tiny_config, tiny_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from records import batch_of, by_sequence, sequence, trajectory
from refusals import printed, refused
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.kl import KLController
from openrlhf.algorithms.mismatch import MERGED
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.deepspeed.optimizer_state import OptimizerState
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.backends.vllm.engine import CPU_KV_CACHE_GB, VLLMEngine
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.cluster import actors, pending, rank_groups
from openrlhf.cluster.engine_memory import ExclusiveDevices
from openrlhf.cluster.layout import ENGINES, compute_layout
from openrlhf.cluster.placement import Bundles, place
from openrlhf.cluster.rank_groups import CriticRanks, FrozenRanks, PolicyRanks, RankGroup
from openrlhf.config import choices
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    EvalConfig,
    KLConfig,
    PPOCkptConfig,
    PPOConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from openrlhf.config.sections import LoraConfig, ScorerDeepSpeedConfig
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.data.scored import score_last
from openrlhf.errors import ErrorCode
from openrlhf.loop.rl import PPOTrainer
from openrlhf.loop.rl_command import build_trainer
from openrlhf.mesh import Mesh
from openrlhf.models.loading import DTYPES, policy_tokenizer
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.hooks.base import Hook, Step
from openrlhf.observability.hooks.memory import PhaseMemory
from openrlhf.observability.observer import Observer
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rollout.worker import engine_options
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.doctor.health import Health
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.tools.selftest.step_checks import StepChecks
from openrlhf.training import trained_worker
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.rl_data import RLData, build_prompt_datasets
from openrlhf.training.saving import restore
from openrlhf.training.schedule import prompts_of_steps, training_schedule
from openrlhf.training.trained_worker import CriticWorker, PolicyWorker
from openrlhf.training.worker import FrozenWorker, RewardWorker, row_groups
from openrlhf.types import (
    Batch,
    ExperienceRow,
    LossNorm,
    Metrics,
    PackedRow,
    Prompt,
    PromptGroup,
    Purpose,
    Schedule,
    Trajectory,
    not_none,
)

NUM_SAMPLES = 2
"""Samples of each prompt."""


# ---- a cluster in this process


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


@pytest.fixture(autouse=True)
def everything_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- numbers that overflow


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_policies_a_thousand_nats_apart_have_a_finite_loss_and_gradient(loss_type, correction):
    """Five sequences of two actions move the policy up and down from the old one and put the old one above
    and below the sampler; the last sequence does everything at once."""
    far = 1000.0
    log_probs = torch.tensor([far, far, -far, -far, 0, 0, 0, 0, far, -far], requires_grad=True)
    batch = replace(
        ExperienceRow.of(batch_of([sample_of(3)] * 5, log_probs=0.0)),
        rollout_log_probs=torch.tensor([0, 0, 0, 0, -far, -far, far, far, far, -far]),
        advantages=torch.tensor([-1.0, 1.0] * 5),
        ref_log_probs=torch.zeros(10),
    )
    objective = PolicyObjective(loss_type=loss_type, correction=correction, kl_coef=0.1, kl_estimator="k3")
    loss, metrics = objective(
        lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
        batch,
        LossNorm(10, 5),
    )
    loss.backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in (loss, *metrics.values()))
    if correction:
        assert metrics["policy/is_weight_mean"] <= objective.correction_high


# ---- samples that are lost or used twice

REWARDS = {"compared": (0.0, 1.0), "solved": (1.0, 1.0), "alone": (0.5, None)}
"""Rewards of the samples of a prompt; filtering does not keep those that are solved."""


@pytest.mark.processes
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_accepted_sample_is_learned_from_once_in_each_epoch(data):
    """Samples pass through filtering, batches that are sampled ahead, failures, a critic that warms up, a
    last rollout of fewer samples than ranks, and any number of ranks."""
    filters, num_prompts = data.draw(st.booleans(), "filters"), data.draw(st.integers(1, 9), "prompts")
    kinds = data.draw(
        st.lists(st.sampled_from(sorted(REWARDS)), min_size=num_prompts, max_size=num_prompts), "kinds"
    )
    accepted = [kind != "solved" or not filters for kind in kinds]
    assume(any(accepted))
    batch, episodes = data.draw(st.integers(1, 4), "batch"), data.draw(st.integers(1, 2), "episodes")
    epochs = data.draw(st.integers(1, 2), "epochs")
    frozen = data.draw(st.integers(0, min(2, -(-num_prompts // batch) * episodes - 1)), "frozen")
    config = config_of(
        batch=batch,
        at_a_time=data.draw(st.none() | st.integers(1, 9), "at a time"),
        train_batch=data.draw(st.integers(1, 8), "train batch"),
        num_episodes=episodes,
        max_epochs=epochs,
        filters=filters,
        estimator="gae",
        freezing_steps=frozen,
        dynamic_batch_enable=data.draw(st.booleans(), "dynamic"),
        max_tokens_per_gpu=data.draw(st.integers(1, 12), "budget"),
    )
    ranks = data.draw(st.integers(1, 4), "ranks")
    run = Run(config, num_prompts, lambda episode, prompt: REWARDS[kinds[prompt]], num_ranks=ranks)
    run.trainer.fit()

    groups = [(episode, prompt) for episode, prompt in run.asked if accepted[prompt]]
    assert sorted(run.asked) == list(itertools.product(range(config.train.num_episodes), range(num_prompts)))
    finished = [
        [run.number_of(e, p, i) for i, reward in enumerate(REWARDS[kinds[p]]) if reward is not None]
        for e, p in groups
    ]
    critic = run.learned(run.trainer.critic)
    assert in_order(critic) == sorted(epochs * [n for numbers in finished for n in numbers])
    assert all(any(ranks) for ranks in critic)  # no optimizer step is without a sample
    policy = run.learned(run.policy)
    warm_up, after = critic[: len(critic) - len(policy)], critic[len(critic) - len(policy) :]
    assert in_order(policy) == in_order(after)
    assert bool(warm_up) == (frozen > 0) and (len(policy) > 0) == (run.trainer.step > frozen)


def test_groups_that_were_accepted_when_the_prompts_ran_out_are_learned_from():
    """Three of five prompts teach something. The third one is alone in the last batch of two."""
    teaches = {0, 2, 4}
    run = Run(config_of(filters=True), 5, lambda episode, prompt: (0.0, float(prompt in teaches)))
    run.trainer.fit()
    steps = run.learned(run.policy)
    assert [len(ranks[0]) for ranks in steps] == [4, 2]
    assert in_order(steps) == sorted(run.number_of(0, p, i) for p in teaches for i in (0, 1))


def test_what_the_critic_warmed_up_on_is_kept_for_nobody():
    """The policy's workers hear nothing of the two steps in which only the critic learns, and then of the
    third step's samples alone."""
    run = Run(config_of(estimator="gae", freezing_steps=2), 6, lambda episode, prompt: (0.0, 1.0))
    run.trainer.fit()
    (handle,) = run.policy.workers
    (batch, _, _), *more = [args for name, args in handle.sent if name == "update"]
    third = sorted(run.number_of(0, prompt, i) for _, prompt in run.asked[4:] for i in (0, 1))
    assert not more
    assert sorted(numbers_of(batch)) == third


# ---- dispatch to ranks

lengths_lists = st.lists(st.integers(2, 20), min_size=1, max_size=12)


@pytest.mark.processes
@settings(deadline=None, max_examples=60)
@given(lengths_lists, st.integers(1, 5), st.booleans(), st.integers(2, 40), st.integers(1, 3))
def test_every_rank_has_a_row_and_no_row_is_too_long(lengths, num_ranks, dynamic, budget, most):
    """Rows are checked where models score and where they learn, also with fewer samples than ranks."""
    config = config_of(
        train_batch=len(lengths),
        dynamic_batch_enable=dynamic,
        max_tokens_per_gpu=budget,
        micro_batch_size=most,
    )
    config = replace(config, rollout=replace(config.rollout, micro_batch_size=most))
    batch = batch_of([sample_of(length, number) for number, length in enumerate(lengths)], log_probs=0.0)
    policy = group_of(PolicyRanks, config, num_ranks, slope=1.0)
    answers = policy.forward(batch).result()
    updated = policy.update(replace(batch, log_probs=None), schedule_of(batch, 1, num_ranks), 0.0).result()

    first = batch.select(updated.first)
    assert sorted(updated.first) == list(range(len(batch)))
    assert not_none(updated.log_probs).tolist() == first.token_ids[first.action_mask].tolist()
    assert answers.tolist() == batch.token_ids[batch.action_mask].tolist()
    scored = [rows for engine in engines_of(policy) for rows in engine.asked]
    learned = [[row.row for row in step] for engine in engines_of(policy) for step in engine.learned]
    for ranks in (scored, learned):
        assert len(ranks) == num_ranks and all(ranks)
        assert sorted(n for rows in ranks for n in numbers_in(rows)) == list(range(len(lengths)))
        for row in (row for rows in ranks for row in rows):
            assert len(row.lengths) == 1 or (
                sum(row.lengths) <= budget if dynamic else len(row.lengths) <= most
            )


def test_nine_samples_occupy_all_of_four_ranks():
    """A wrong schedule would put the samples on three ranks with three samples each."""
    policy = group_of(PolicyRanks, config_of(), 4)
    batch = batch_of([sample_of(5, number) for number in range(9)], log_probs=0.0)
    policy.forward(batch).result()
    policy.update(batch, schedule_of(batch, 1, 4), 0.0).result()
    engines = engines_of(policy)
    assert sorted(len(numbers_in(engine.asked[0])) for engine in engines) == [2, 2, 2, 3]
    assert sorted(len(learned_in(engine.learned[0])) for engine in engines) == [2, 2, 2, 3]


@pytest.mark.parametrize("mesh", [Mesh(data=2, sequence=2), Mesh(data=2, tensor=2)])
def test_ranks_that_share_samples_get_the_same_ones(mesh):
    """Each sample is scored and learned from once along the data dimension."""
    policy = group_of(PolicyRanks, config_of(), mesh, slope=1.0)
    batch = batch_of([sample_of(5, number) for number in range(9)], log_probs=0.0)
    assert policy.forward(batch).result().tolist() == batch.token_ids[batch.action_mask].tolist()
    policy.update(batch, schedule_of(batch, 1, mesh.data), 0.0).result()
    for read in (lambda engine: numbers_in(engine.asked[0]), lambda engine: learned_in(engine.learned[0])):
        one, same, two, again = (read(engine) for engine in engines_of(policy))
        assert one == same and two == again and sorted(one + two) == list(range(9))


def test_one_more_token_than_two_rows_hold_needs_a_third():
    """The rows have 21 tokens for a budget of 10: rounded down there would be two rows, and one of them too
    long."""
    assert len(row_groups([7, 7, 7], max_tokens=10, max_sequences=1)) == 3
    rows = row_groups([5, 5, 5, 5, 1], max_tokens=10, max_sequences=1)
    assert sorted(sum([5, 5, 5, 5, 1][i] for i in row) for row in rows) == [1, 10, 10]


def test_a_sample_travels_to_one_rank_only():
    """A sample is sent once to be scored and once to be learned from, whatever the other ranks get."""
    policy = group_of(PolicyRanks, config_of(train_batch=4), 3)
    batch = batch_of([sample_of(3 + number % 5, number) for number in range(12)], log_probs=0.0)
    policy.forward(batch).result()
    policy.update(batch, schedule_of(batch, 3, 3), 0.0).result()
    for method in ("forward", "update"):
        shares = [args[0] for handle in policy.workers for name, args in handle.sent if name == method]
        assert len(shares) == 3
        assert sorted(number for share in shares for number in numbers_of(share)) == list(range(12))


def test_a_sample_of_several_epochs_travels_once():
    policy = group_of(PolicyRanks, config_of(), 1)
    batch = batch_of([sample_of(3, number) for number in range(4)], log_probs=0.0)
    policy.update(batch, [[[3, 1]], [[0]], [[1, 0]], [[3]]], 0.0).result()
    ((share, mini_batches, _),) = [args for name, args in policy.workers[0].sent if name == "update"]
    assert numbers_of(share) == [0, 1, 3] and mini_batches == [[2, 1], [0], [1, 0], [2]]
    (engine,) = engines_of(policy)
    assert [sorted(learned_in(step)) for step in engine.learned] == [[1, 3], [0], [0, 1], [3]]


def test_an_update_tells_log_probs_of_the_policy_before_it():
    """Log-probs are those that its first optimizer step reads, and no later one; a batch that brings its own
    gets none."""
    policy = group_of(PolicyRanks, config_of(), 2)
    batch = batch_of([sample_of(3 + number, number) for number in range(4)])

    def told(schedule: Schedule) -> list[int]:
        updated = policy.update(batch, schedule, 0.0).result()
        first = batch.select(updated.first)
        assert not_none(updated.log_probs).tolist() == first.token_ids[first.action_mask].tolist()
        return updated.first

    assert told([[[3, 1], [0, 2]]]) == [3, 1, 0, 2]
    assert told([[[3], [0]], [[1], [2]]]) == [3, 0]
    assert told([[[3, 1], [0]]]) == [3, 1, 0]
    assert told([[[3], []], [[1], [2]]]) == [3]
    known = batch_of([sample_of(3)] * 4, log_probs=0.0)
    assert policy.update(known, [[[3, 1], [0, 2]]], 0.0).result().log_probs is None


def test_an_update_tells_what_rounding_left_of_the_adapters_in_the_engines():
    policy = group_of(PolicyRanks, config_of(), 2)
    batch = batch_of([sample_of(3)] * 4)
    assert MERGED not in policy.update(batch, [[[3, 1], [0, 2]]], 0.0).result().metrics
    for engine in engines_of(policy):
        engine.merged_fraction = 0.25
    metrics = policy.update(batch, [[[3], [0]], [[1], [2]]], 0.0).result().metrics
    assert metrics[MERGED] == 0.25
    assert any("--vllm.lora_sync adapter" in text for text in Health().check(metrics))


# ---- rewards


def test_every_server_is_asked_and_none_is_asked_for_nothing():
    """Five samples go to three servers; the reward of each is that of the server that was asked for it."""
    urls = [f"http://server{i}/get_reward" for i in range(3)]
    posted: list[tuple[str, int]] = []

    class Servers(RemoteReward):
        async def _post(self, url: str, body: bytes, count: int) -> list[Any]:
            posted.append((url, count))
            return [SimpleNamespace(reward=url)] * count

    async def ask() -> list:
        reward = Servers(urls, timeout=5.0, batch_size=1)
        return await asyncio.gather(*(reward(f"text {i}", "text", "") for i in range(5)))

    answers = asyncio.run(ask())
    assert Counter(count for _, count in posted) == {1: 5}
    assert Counter(url for url, _ in posted) == Counter([*urls, *urls[:2]])
    assert Counter(answer.reward for answer in answers) == Counter(url for url, _ in posted)


def test_prompts_with_the_same_text_are_told_apart():
    """One is always solved and one never: as one prompt of four samples, two of them would have a solved one
    with 5/6, and every sample would differ from its group's mean."""
    prompts = [Prompt(prompt_id=i, text="the same") for i in range(2)]
    trajectories = [trajectory_of(p, i, float(p.prompt_id)) for p in prompts for i in range(2)]
    metrics = evaluation_metrics(trajectories)
    assert (metrics["eval/default_score_mean"], metrics["eval/default_best_of2"]) == (0.5, 0.5)
    batch, _ = credit_of(trajectories, AlgoConfig(advantage=AdvantageConfig(estimator="dr_grpo")))
    assert not_none(batch.advantages).tolist() == [0.0] * 4


def test_rates_of_filtering_count_prompts_and_not_samples():
    """The first of five prompts is kept; of the second one a sample failed; all the others are solved."""
    scores = {0: (0.0, 1.0), 1: (0.5, None)}
    run = Run(
        config_of(batch=2, filters=True, at_a_time=5),
        5,
        lambda episode, prompt: scores.get(prompt, (1.0, 1.0)),
    )
    run.trainer.collector.fill(step := Step(number=1, version=0))
    shares = {name: step.metrics[f"rollout/{name}_ratio"] for name in ("kept", "filtered_high")}
    assert shares == {"kept": 2 / 5, "filtered_high": 3 / 5}
    assert step.metrics["rollout/num_prompts"] == 5


# ---- credit


def trajectory_of(prompt: Prompt, i: int, reward: float, num_actions: int = 1) -> Trajectory:
    return trajectory(
        reward,
        prompt=prompt,
        sample_index=i,
        token_ids=[0] * (2 + num_actions),
        action_mask=[False] * 2 + [True] * num_actions,
    )


def credit_of(
    trajectories: Sequence[Trajectory],
    algo: AlgoConfig,
    *,
    log_ratio: float = 0.0,
    kl_coef: float = 0.0,
    reward: RewardConfig | None = None,
) -> tuple[Batch, Metrics]:
    """Returns the credit where the policy's log-prob of every action is -1, and the reference's `log_ratio`
    less."""
    batch = Batch.of(trajectories, by_prompt=True)
    ones = np.ones(batch.num_actions.sum(), np.float32)
    batch = replace(batch, log_probs=-ones, ref_log_probs=(-1 - log_ratio) * ones, values=ones / 2)
    return compute_advantages(
        batch,
        trajectories,
        estimator=algo.build_estimator(),
        algo=algo,
        reward=reward or RewardConfig(),
        kl_coef=kl_coef,
        max_new_tokens=8,
    )


MEAN_BASELINES = ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
"""Estimators whose baseline weighs all samples of a prompt alike."""


@settings(deadline=None, max_examples=60)
@given(
    estimator=st.sampled_from(MEAN_BASELINES),
    groups=st.lists(
        st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(1, 6)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
)
def test_what_the_samples_of_a_prompt_earn_adds_up_to_nothing(estimator, groups):
    """The lengths do not matter: an advantage that is positive on average would only make samples
    likelier."""
    trajectories = [
        trajectory_of(Prompt(prompt_id=p, text=""), i, reward, length)
        for p, members in enumerate(groups)
        for i, (reward, length) in enumerate(members)
    ]
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator))
    batch, metrics = credit_of(trajectories, algo, reward=RewardConfig(clip_range=(-100, 100)))
    if ESTIMATORS[estimator].whiten:
        assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-5)
    returns = by_sequence(batch, not_none(batch.returns))
    for p in range(len(groups)):
        earned = [r[0] for r, t in zip(returns, trajectories, strict=True) if t.prompt.prompt_id == p]
        assert sum(earned) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("estimator", [name for name, row in ESTIMATORS.items() if row.whiten])
def test_whitened_advantages_have_the_mean_zero_over_actions(estimator):
    trajectories = [
        trajectory_of(Prompt(prompt_id=i // 2, text=""), i % 2, reward, n)
        for i, (reward, n) in enumerate([(3.0, 1), (5.0, 4), (2.0, 2), (9.0, 3)])
    ]
    _, metrics = credit_of(trajectories, AlgoConfig(advantage=AdvantageConfig(estimator=estimator)))
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("use_loss", [False, True])
def test_the_kl_counts_once(use_loss):
    """Two actions have a coefficient of 0.1 and a policy 2 nats above its reference: the KL costs each action
    0.2 of reward, or adds 0.1 * 2^2 / 2 to the loss, and never both."""
    kl = KLConfig(init_coef=0.1, use_loss=use_loss, estimator="k2" if use_loss else "k1")
    config = config_of(kl=kl, estimator="dr_grpo")
    trajectories = [trajectory_of(Prompt(prompt_id=0, text=""), i, 1.0, 2) for i in range(2)]
    batch, _ = credit_of(trajectories, config.algo, log_ratio=2.0, kl_coef=0.1)
    cost = 0.0 if use_loss else 0.2
    assert not_none(batch.advantages).tolist() == pytest.approx([-2 * cost, -cost] * 2)

    loss, _ = PolicyObjective.from_config(config, 0.1)(
        lambda row, temperature, with_entropy: SimpleNamespace(
            log_probs=torch.full((2,), -1.0), entropy=None
        ),
        ExperienceRow.of(batch_of(trajectories[:1], log_probs=-1.0, ref_log_probs=-3.0)),
        LossNorm(2, 1),
    )
    assert loss.item() == pytest.approx(0.1 * 2.0 if use_loss else 0.0)


@pytest.mark.processes
def test_a_coefficient_of_zero_loads_no_reference_and_trains_without_one():
    """GRPO without KL places no reference, asks for none and misses none; the loss is the policy's alone."""
    kl = KLConfig(init_coef=0.0, use_loss=True, estimator="k3")
    with_kl = replace(kl, init_coef=0.01)
    configs = [config_of(kl=one) for one in (kl, with_kl)]
    placed = [set(place(config, compute_layout(config, [{"CPU": 64}]))) for config in configs]
    assert placed == [{"actor", ENGINES}, {"actor", "ref", ENGINES}]
    run = Run(config_of(kl=kl, estimator="group_norm"), 2, lambda episode, prompt: (0.0, 1.0))
    run.trainer.fit()
    (row, *_) = engines_of(run.policy)[0].learned[0]
    assert run.trainer.reference is None and row.ref_log_probs is None
    objective = run.policy.workers[0].worker.objective(0.0)
    assert row.old_log_probs is None  # a step of one update
    log_probs = row.rollout_log_probs
    loss, metrics = objective(
        lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
        row,
        LossNorm(row.num_tokens, row.num_sequences),
    )
    assert "policy/kl_loss" not in metrics
    assert loss.item() == pytest.approx(-row.advantages.mean().item())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_rollout_without_a_single_action_makes_no_nan(estimator):
    """Every mean is over nothing, from credit to both losses and their metrics."""
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(use_loss=True))
    trajectories = [trajectory_of(Prompt(prompt_id=0, text=""), i, float(i), 0) for i in range(2)]
    batch, metrics = credit_of(trajectories, algo, kl_coef=0.1)
    row, values = ExperienceRow.of(batch), torch.zeros(0, requires_grad=True)
    norm = LossNorm(row.num_tokens, row.num_sequences, torch.zeros(1))
    assert (norm.num_tokens, norm.num_sequences) == (0, 0)
    answers = SimpleNamespace(log_probs=values, entropy=values)
    parts = [CriticObjective(value_clip=0.5)(lambda row: values, row, norm)]
    for aggregation in AGGREGATIONS:
        objective = PolicyObjective(
            aggregation=aggregation,
            correction="seq-mask-tis",
            kl_coef=0.1,
            kl_estimator="k3",
            entropy_coef=0.1,
        )
        parts.append(objective(lambda row, temperature, with_entropy: answers, row, norm))
    for loss, found in parts:
        loss.backward()
        assert loss.item() == 0 and set(map(float, found.values())) == {0.0}
    assert all(math.isfinite(value) for value in metrics.values()), metrics


# ---- checkpoints


def folders_in(path: Path) -> dict[str, list[str]]:
    return {role: sorted(p.name for p in (path / role).glob("*_step*")) for role in ("_actor", "_critic")}


def test_the_old_best_is_there_until_the_new_one_is_complete(tmp_path):
    """The critic's part is written and the policy's is not: the best of both models is still the old one."""
    config = config_of(tmp_path, estimator="gae", evaluated=True, save_steps=100)
    run = Run(config, 8, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    engines_of(run.policy)[0].dies_at = "best_global_step2"
    with refused(ErrorCode.NOT_WRITABLE) as told:
        run.trainer.fit()
    assert "_actor/.saving" in told.value.text and "the disk is full" in told.value.text
    assert folders_in(tmp_path) == {role: ["best_global_step1"] for role in ("_actor", "_critic")}

    run = Run(config, 8, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    run.trainer.fit()
    assert folders_in(tmp_path) == {role: ["best_global_step4"] for role in ("_actor", "_critic")}
    assert run.trainer.checkpoints.find().tag is None  # a run does not resume from the best


def test_latest_names_a_checkpoint_of_its_own_and_never_the_best(tmp_path):
    config = config_of(tmp_path, evaluated=True, save_steps=2)
    run = Run(config, 6, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    run.trainer.fit()
    assert run.trainer.step == 3
    assert folders_in(tmp_path)["_actor"] == ["best_global_step3", "global_step2"]
    assert run.trainer.checkpoints.find().tag == "global_step2"


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(tmp_path):
    """The resumed run has the prompts, groups that wait, the order of every optimizer step on every rank, the
    coefficient of the KL as its controller has it, and the best evaluation so far."""
    scores = [0.1, 0.2, 0.9, 0.3, 0.5, 0.7, 0.8, 0.6]
    rewards = {0: (1.0, 1.0)}

    def run_in(path: Path, resume: bool = False) -> Run:
        config = config_of(
            path,
            estimator="gae",
            filters=True,
            at_a_time=5,
            train_batch=2,
            num_episodes=2,
            kl=KLConfig(init_coef=0.1, target=0.001),
            evaluated=True,
            save_steps=1,
        )
        return Run(
            config,
            8,
            lambda episode, prompt: rewards.get(prompt, (0.0, 1.0)),
            evaluation=lambda version: scores[version],
            num_ranks=2,
            resume=resume,
        )

    whole = run_in(tmp_path / "whole")
    whole.trainer.fit()
    first = run_in(tmp_path / "halves")
    first.trainer.total_steps = 3
    first.trainer.fit()
    second = run_in(tmp_path / "halves", resume=True)
    assert second.trainer.step == 3
    assert second.trainer.collector.state_dict()["groups"]  # some groups wait
    second.trainer.fit()

    def told(run: Run) -> list[float]:
        return [args[2] for name, args in run.policy.workers[0].sent if name == "update"]

    assert whole.trainer.step == second.trainer.step == 7
    assert first.asked + second.asked == whole.asked
    for role in ("policy", "critic"):
        one, other, both = (run.learned(getattr(run.trainer, role)) for run in (first, second, whole))
        assert one + other == both
    assert told(first) + told(second) == told(whole) and len(set(told(whole))) == 7
    assert second.trainer.best_metric == whole.trainer.best_metric == 0.9
    best = [p.name for p in (tmp_path / "halves" / "_actor").glob("best*")]
    assert best == ["best_global_step2"]


def test_the_moving_average_is_in_the_checkpoint(tmp_path, monkeypatch):
    alone(monkeypatch)
    calls: list[str] = []
    engine = engine_without_deepspeed()
    monkeypatch.setattr(
        "openrlhf.backends.deepspeed.engine.load_states", lambda engine, checkpoint: engine.kept
    )
    engine.average = SimpleNamespace(
        save=lambda writer: calls.append(f"save {writer.folder}"),
        load=lambda folder: calls.append(f"load {folder}"),
    )
    folder = tmp_path / "global_step1"
    engine.save_checkpoint(str(tmp_path), folder.name, {"step": 1})
    assert engine.load_checkpoint(str(tmp_path), folder.name) == {"step": 1}
    assert calls == [f"save {folder}", f"load {folder}"]


def test_a_checkpoint_has_no_files_of_an_earlier_attempt(tmp_path, monkeypatch):
    """The earlier attempt had more ranks, or another ZeRO stage."""
    alone(monkeypatch)
    stale = tmp_path / "one" / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    stale.parent.mkdir()
    stale.touch()
    engine_without_deepspeed().save_checkpoint(str(tmp_path), "one", {})
    assert sorted(path.name for path in stale.parent.iterdir()) == ["manifest.json", "random_state_0.pt"]


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the process group by one of a single rank."""
    for name, answer in {"barrier": None, "get_rank": 0, "get_world_size": 1}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda answer=answer: answer)
    gather = lambda found, own: found.__setitem__(0, own)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)


def engine_without_deepspeed() -> Any:
    """Returns a DeepSpeedEngine around an engine that keeps what it saves."""
    engine, kept = DeepSpeedEngine.__new__(DeepSpeedEngine), {}

    def save(folder: str, **options) -> None:
        kept.update(options["client_state"])

    engine.engine = SimpleNamespace(
        save_checkpoint=save,
        kept=kept,
        checkpoint_mp_rank=0,
        optimizer=SimpleNamespace(param_groups=[]),
        param_names={},
        lr_scheduler=LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), lambda step: 1.0),
    )
    engine.average, engine.stage, engine.mesh, engine.files = None, 0, ProcessMesh(), SimpleNamespace()
    engine.optimizer_state = OptimizerState(engine.engine, on_host=True)
    engine.check_finite = lambda: None  # there are no weights
    return engine


def test_a_checkpoint_that_is_not_found_is_an_error_and_no_empty_state(tmp_path):
    (tmp_path / "global_step1").mkdir()
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value=tmp_path / "global_step1"):
        engine_without_deepspeed().load_checkpoint(str(tmp_path), "global_step1")


def test_a_run_that_may_resume_and_finds_nothing_starts_at_the_beginning(tmp_path):
    config = config_of(tmp_path / "ckpt", kl=KLConfig(init_coef=0.25), save_steps=1)
    config = replace(
        config,
        ckpt=replace(config.ckpt, load_enable=True),
        logger=replace(config.logger, run_dir=str(tmp_path / "run")),
    )
    run, origin = Run(config, 4, lambda episode, prompt: (0.0, 1.0)), RunFingerprint.of("ppo", config, {})
    prompts = PromptDataset([Prompt(prompt_id=i, text="") for i in range(4)])

    def build() -> PPOTrainer:
        roles = SimpleNamespace(
            rollout=run,
            policy=run.policy,
            critic=None,
            reference=run.trainer.reference,
            teacher=None,
            peak_memory=lambda: SimpleNamespace(result=dict),
        )
        tokenizer = SimpleNamespace(chat_template=None, decode=lambda ids, **options: str(ids))
        checkpoints = CheckpointFolder(f"{config.ckpt.folder}/_actor", config.ckpt, fingerprint=origin)
        tag, _ = checkpoints.choose()
        return build_trainer(config, [], roles, RLData(prompts, [], None, tokenizer), checkpoints, tag)

    trainer = build()
    assert (trainer.step, trainer.kl.coef, trainer.best_metric) == (0, 0.25, None)
    assert [type(hook) for hook in trainer.hooks] == [StepChecks, PhaseMemory, Observer]
    trainer.fit()
    trainer.observer.close()
    again = build()
    assert again.step == trainer.step == 2
    again.observer.close()
    config = replace(config, train=replace(config.train, verify_steps=1))
    build().observer.close()  # the orders of two epochs differ


# ---- whose setting is it?


@pytest.mark.parametrize("name", get_args(choices.ParamDtype))
def test_the_sampler_has_the_precision_of_the_trainer(monkeypatch, name):
    """Weights of another precision could not be loaded bit by bit: fp16 is no exception."""

    class Started(Exception):
        pass

    class Arguments:
        def __init__(self, dtype: str, *, kv_cache_memory_bytes: int, **options) -> None:
            raise Started(dtype, kv_cache_memory_bytes)

    names = SimpleNamespace(
        AsyncEngineArgs=Arguments,
        WeightTransferConfig=lambda **options: None,
        UsageContext=None,
        AsyncLLM=None,
    )
    monkeypatch.setattr("openrlhf.backends.vllm.engine.library", lambda: names)
    config = replace(PPOConfig(), ds=ScorerDeepSpeedConfig(param_dtype=name))
    with pytest.raises(Started) as started:
        asyncio.run(VLLMEngine(engine_options(config, on_gpu=False)).start())
    dtype, cache = started.value.args
    assert getattr(torch, dtype) is DTYPES[name] and cache == CPU_KV_CACHE_GB * 2**30


def test_the_chat_template_of_the_flag_is_that_of_prompts_and_of_the_exported_tokenizer(tmp_path):
    tiny_chat_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1"}\n')
    template = "{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}"
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(tmp_path / "model")),
        data=PromptDataConfig(
            prompt_dataset=str(tmp_path / "prompts.jsonl"),
            apply_chat_template=True,
            tokenizer_chat_template=template,
            max_len=64,
        ),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo")),
    )
    prompts, _, tokenizer = build_prompt_datasets(config)
    assert prompts[0].text == "Q: 1 + 1 A:"
    assert tokenizer.chat_template == policy_tokenizer(config).chat_template == template


@pytest.mark.parametrize(("own", "expected"), [(0.5, 0.5), (0.0, 0.0), (None, 0.25)])
def test_the_critic_balances_its_experts_by_its_own_coefficient(own, expected):
    """A critic without a coefficient of its own takes the actor's; 0 is a coefficient."""
    config = replace(
        PPOConfig(), actor=ActorConfig(aux_loss_coef=0.25), critic=CriticConfig(aux_loss_coef=own)
    )
    objective = CriticWorker(config, 0, Mesh()).objective(0.0)
    assert (objective.coef if isinstance(objective, BalancedObjective) else 0.0) == expected
    of_policy = PolicyWorker(config, 0, Mesh()).objective(0.0)
    assert isinstance(of_policy, BalancedObjective) and of_policy.coef == 0.25


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("worker_class", [PolicyWorker, FrozenWorker])
def test_log_probs_are_of_the_temperature_that_was_sampled_at(worker_class, temperature):
    """The log-probs are those before the update, of the policy and of its reference. The update computes them
    in the same way, so that its first ratios are 1."""
    config = replace(PPOConfig(), rollout=RolloutConfig(temperature=temperature))
    policy = PolicyModel(tiny_model(tiny_config("qwen3"))).eval()
    batch = Batch.of([trajectory(0.0, [2, 3, 4]), trajectory(1.0, [7, 8])])
    worker = worker_class(config, 0, Mesh())
    worker.model = SimpleNamespace(
        forward=lambda rows, read: [read(policy, row) for row in rows],
        shares_prefixes=False,
        trains_on_prefixes=False,
    )
    with torch.no_grad():
        found = torch.from_numpy(worker.forward(batch))
        samples = [sequence(ids) for ids in ([1, 2, 3, 4], [1, 7, 8])]
        expected = torch.cat([plain_log_probs(policy.model, sample, temperature) for sample in samples])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    if worker_class is PolicyWorker:
        seen: list[Tensor] = []
        ones = np.ones(len(found), np.float32)
        learned = replace(batch, log_probs=found.numpy(), advantages=ones, returns=ones)
        for row in worker.rows(learned, [0, 1]):
            worker.objective(0.0, seen)(policy, row, LossNorm(5, 2))
        torch.testing.assert_close(torch.cat(seen), found, atol=1e-5, rtol=0)


def test_the_reference_of_adapters_is_the_model_without_them():
    model = tiny_model(tiny_config("qwen3"))
    batch = Batch.of([trajectory(0.0, [2, 3, 4])])
    worker = PolicyWorker(replace(PPOConfig(), rollout=RolloutConfig()), 0, Mesh())
    before = PolicyModel(copy.deepcopy(model)).eval()
    ds = replace(worker.config.ds, lora=LoraConfig(rank=2, alpha=4, target_modules=("q_proj",)))
    policy = PolicyModel(prepare_for_training(model, ds)).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    answer = lambda rows, read: [read(policy, row).detach() for row in rows]
    worker.model = SimpleNamespace(forward=answer, module=policy, shares_prefixes=False)
    with torch.no_grad():
        expected = before(PackedRow.from_batch(batch)).log_probs.numpy()
    assert worker.forward_without_adapters(batch) == pytest.approx(expected, abs=1e-6)
    assert np.abs(worker.forward(batch) - expected).max() > 1e-3


def test_pretraining_texts_go_on_after_the_steps_that_are_done():
    worker = PolicyWorker(PPOConfig(), 0, Mesh())
    worker.model = SimpleNamespace(steps=3, load_checkpoint=lambda folder, tag: {})
    worker.text_mini_batches = SimpleNamespace(endless=itertools.count)
    worker.load_checkpoint("global_step1")
    assert next(worker.text_rows) == 3


def test_rewards_of_packed_answers_go_to_their_samples():
    """Rows hold the answers in another order, longest first; scores are normalized."""
    config = replace(PPOConfig(), train=TrainConfig(dynamic_batch_enable=True, max_tokens_per_gpu=9))
    worker = RewardWorker(config, 0, Mesh())
    last_tokens = lambda rows, read: [row.token_ids[row.actions].float() for row in rows]
    reader = lambda t: score_last(t.token_ids.tolist(), len(t.token_ids))
    worker.models, worker.readers = [SimpleNamespace(forward=last_tokens, shares_prefixes=False)], [reader]
    worker.statistics = [(10.0, 2.0)]
    answers = [[30], [4, 4, 40], [50, 5], [6, 6, 6, 60]]
    found = worker.forward([trajectory(0.0, answer) for answer in answers])
    assert found.tolist() == [[(answer[-1] - 10) / 2] for answer in ([30], [40], [5], [60])]


@pytest.mark.parametrize(
    ("actor", "critic", "expected"),
    [(False, True, True), (True, False, False), (True, None, True), (False, None, False)],
)
def test_the_critic_recomputes_activations_by_its_own_flag(monkeypatch, actor, critic, expected):
    config = replace(
        PPOConfig(),
        actor=ActorConfig(gradient_checkpointing_enable=actor),
        critic=CriticConfig(gradient_checkpointing_enable=critic),
    )
    made = [
        options_of_engine(worker_class, config, monkeypatch) for worker_class in (PolicyWorker, CriticWorker)
    ]
    assert [options["gradient_checkpointing"] for options in made] == [actor, expected]
    assert made[0]["optim"] is config.actor and made[1]["optim"] is config.critic


def options_of_engine(
    worker_class: type, config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Returns the options that a worker builds its engine with."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(worker_class, "join", lambda self, address, port: None)
    monkeypatch.setattr(trained_worker, "build_engine", lambda build, **options: made.update(options))
    worker_class(config, 0, Mesh()).start("", 0, 10)
    return made


COMMAND = "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url http://localhost:1/reward"
REENTRANT = "--actor.gradient_checkpointing_reentrant"


def test_the_variant_of_checkpointing_may_be_set_for_the_critic_alone():
    config = parse(PPO, f"{COMMAND} --critic.gradient_checkpointing_enable {REENTRANT}".split()).config
    assert config.actor.gradient_checkpointing_reentrant


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_checkpointing_that_hides_the_routers_from_the_balance_loss_is_refused(role, capsys):
    words = f"--{role}.gradient_checkpointing_enable --{role}.aux_loss_coef 0.1"
    with pytest.raises(SystemExit):
        parse(PPO, f"{COMMAND} {words} {REENTRANT}".split())
    (refusal,) = printed(capsys.readouterr().err)
    assert (refusal.code, refusal.place) == ("unsupported", REENTRANT)
    assert f"({role}.aux_loss_coef)" in refusal.text
