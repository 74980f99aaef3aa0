"""The engine and the models of an RL run in one process, without Ray."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from openrlhf.algorithms.mismatch import PROBE
from openrlhf.backends.weight_sync.stored_weights import Limit, build_run_probe, check_stored
from openrlhf.cluster.in_process import InProcess
from openrlhf.cluster.pending import Answer, Gathered, first
from openrlhf.cluster.rank_groups import (
    AdapterDisabledReference,
    CriticRanks,
    FrozenRanks,
    PolicyRanks,
    RewardRanks,
)
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import ACTOR_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.data.store import SampleStore
from openrlhf.rollout.dispatch import Dispatcher
from openrlhf.rollout.local import LocalEngine
from openrlhf.rollout.worker import RolloutWorker, group_sizes, local_options
from openrlhf.types import Metrics, Prompt, PromptGroup, Purpose, Sampled, not_none
from openrlhf.user_file import UserFiles

# bounded .result(): calls run at once, in this process.


class NoEngines:
    """Replaces the engines in a process that samples nothing."""

    def sync(self, policy: Any, version: int) -> Gathered[Metrics]:
        """Does nothing."""
        return Gathered([Answer({})], first)

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> NoReturn:
        raise RuntimeError("nothing can be sampled without engines")

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> NoReturn:
        raise RuntimeError("nothing can be sampled without engines")


class LocalRollout(LocalEngine):
    """One engine in this process, with the agent and the rewards of the flags: implements `Rollout`."""

    def __init__(self, config: PPOConfig, reward: RewardRanks | None) -> None:
        """Starts the engine with the weights of the model's files."""
        self.config, self.options = config, local_options(config)
        self.policy: PolicyRanks | None = None
        """The policy whose weights the engine receives; None before the first sync."""
        self.probe = build_run_probe(config)
        """The tokens on which trainer and engine are compared after each sync."""
        self.limit = Limit.from_config(config, on_gpu=self.options.on_gpu)
        """The difference of their log-probs that rounding explains."""
        files = UserFiles.of(*config.users_files)
        super().__init__(self.options, lambda options: RolloutWorker(config, options, files))
        self.num_samples = group_sizes(config)
        self.dispatcher = Dispatcher(
            [self],
            self.num_samples,
            memory=self,
            longest=config.longest_response,
            score=reward.score if reward else None,
        )

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        work = self.engine.run_group(prompt, purpose, samples)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def set_sampling(self, flags: Mapping[str, Any]) -> None:
        """Sets flags that say how later prompts are sampled."""
        self.num_samples.update(group_sizes(with_values(self.config, flags)))
        self.call(self.engine.set_sampling(flags))

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.dispatcher.submit(prompts, purpose)

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        return self.dispatcher.next_group(purpose, timeout)

    def wake(self) -> None:
        """Does nothing: models and engine are in memory together."""

    def sleep(self) -> None:
        """Does nothing, like `wake`."""

    def sync(self, policy: PolicyRanks, version: int) -> Gathered[Metrics]:
        if self.policy is None:
            policy.open_weight_sync(self, self.options.transfer_backend).result()
            self.policy = policy
        trainer = not_none(policy.send_weights(version, self.probe).result())
        answer = self.call(self.engine.answer(self.probe))
        return Gathered([Answer({PROBE: check_stored(trainer, 0, answer, self.limit)})], first)

    def close(self) -> None:
        self.dispatcher.close()
        self.call(self.engine.close())
        self._end_loop()


@dataclass
class LocalRoles:
    """The models of a run, without engines. A role that the run does not have is None."""

    policy: PolicyRanks
    critic: CriticRanks | None = None
    reference: FrozenRanks | AdapterDisabledReference | None = None
    teacher: FrozenRanks | None = None
    rollout: NoEngines = field(default_factory=NoEngines)

    def peak_memory(self) -> Gathered[Metrics]:
        """Returns no metrics, because one process with all models needs other memory than the run's."""
        return Gathered([Answer({})], first)


def start_local_roles(
    config: PPOConfig, updates: int, critic_updates: int, texts: SampleStore | None = None
) -> LocalRoles:
    """Loads the models. `updates`, `critic_updates`: optimizer steps of the whole run, which determine the
    schedules of learning rates. `texts`: pre-training texts of PPO-ptx."""
    roles = LocalRoles(PolicyRanks(config, InProcess()))
    roles.policy.start(updates, texts).result()
    if config.uses_critic:
        roles.critic = CriticRanks(config, InProcess())
        roles.critic.start(critic_updates).result()
    path = config.actor.model_name_or_path
    if config.uses_reference and config.ds.lora.rank:
        roles.reference = AdapterDisabledReference(roles.policy)
    elif config.uses_reference:
        roles.reference = _frozen(config, path, ACTOR_FLAG, config.ref.offload)
    if path := config.teacher.model_name_or_path:
        roles.teacher = _frozen(config, path, TEACHER_FLAG, config.teacher.offload)
    return roles


def start_local_rollout(config: PPOConfig) -> LocalRollout:
    """Starts an engine, and loads the reward models."""
    reward = RewardRanks(config, InProcess()) if config.uses_reward_model else None
    if reward:
        reward.start().result()
    return LocalRollout(config, reward)


def _frozen(config: PPOConfig, path: str, flag: str, offload: bool) -> FrozenRanks:
    ranks = FrozenRanks(config, InProcess())
    ranks.start(path, flag, offload).result()
    return ranks
