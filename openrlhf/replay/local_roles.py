"""Loads the models of an RL run into one process, without engines and reward models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from openrlhf.cluster.in_process import InProcess
from openrlhf.cluster.pending import Answer, Gathered, first
from openrlhf.cluster.rank_groups import CriticRanks, FrozenRanks, PolicyRanks, Unadapted
from openrlhf.config.ppo import ACTOR_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.data.store import SampleStore
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.training.schedule import num_updates
from openrlhf.types import Metrics, Prompt, Purpose

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


@dataclass(kw_only=True)
class LocalRoles:
    """The models of a run. A role that the run does not have is None."""

    rollout: NoEngines
    policy: PolicyRanks
    critic: CriticRanks | None = None
    reference: FrozenRanks | Unadapted | None = None
    teacher: FrozenRanks | None = None

    def peak_memory(self) -> Gathered[Metrics]:
        """Returns no metrics, because one process with all models needs other memory than the run's."""
        return Gathered([Answer({})], first)


def start_local_roles(config: PPOConfig, num_prompts: int, texts: SampleStore | None) -> LocalRoles:
    """Loads the models. `num_prompts`, `texts`: as in `start_roles`. Raises UsageError if a model had several
    ranks, or if one process would draw other random numbers than the run's processes."""
    check_one_process(config)
    updates = num_updates(config, num_prompts, config.frozen_actor_steps)
    roles = LocalRoles(rollout=NoEngines(), policy=PolicyRanks(config, InProcess()))
    roles.policy.start(updates, texts).result()
    if config.uses_critic:
        roles.critic = CriticRanks(config, InProcess())
        roles.critic.start(num_updates(config, num_prompts)).result()
    path = config.actor.model_name_or_path
    if config.uses_reference and config.ds.lora.rank:
        roles.reference = Unadapted(roles.policy)
    elif config.uses_reference:
        roles.reference = _frozen(config, path, ACTOR_FLAG, config.ref.offload)
    if path := config.teacher.model_name_or_path:
        roles.teacher = _frozen(config, path, TEACHER_FLAG, config.teacher.offload)
    return roles


def _frozen(config: PPOConfig, path: str, flag: str, offload: bool) -> FrozenRanks:
    ranks = FrozenRanks(config, InProcess(), path=path, flag=flag, offload=offload)
    ranks.start().result()
    return ranks


def check_one_process(config: PPOConfig) -> None:
    """Raises UsageError if one process cannot compute what the run's processes computed."""
    sizes = {role: own.mesh.size for role, own in config.placements.items() if role != "reward"}
    if several := [f"{role} {size}" for role, size in sizes.items() if size > 1]:
        text = (
            f"a replay has one rank of each model, but the run had {', '.join(several)}; replay another run"
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--actor.num_gpus_per_node")
    if config.uses_critic and config.ds.lora.dropout > 0:
        text = (
            "policy and critic would draw dropout from one random generator instead of two, so the replay "
            "would differ; runs with a critic can be replayed without dropout of adapters"
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.lora.dropout", value=config.ds.lora.dropout)
