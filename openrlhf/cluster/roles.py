"""The roles of a run: every engine and model, placed, loaded, and with weights flowing between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from openrlhf.cluster.engine_pool import EnginePool
from openrlhf.cluster.group import CriticGroup, FrozenGroup, PolicyGroup, RewardGroup
from openrlhf.cluster.layout import ENGINES
from openrlhf.cluster.placement import Bundles
from openrlhf.config.ppo import ACTOR_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.datasets.store import SampleStore
from openrlhf.trainer.schedule import num_updates


@dataclass(kw_only=True, slots=True)
class Roles:
    """None for a role that the run does not have."""

    rollout: EnginePool
    policy: PolicyGroup
    critic: CriticGroup | None = None
    reference: FrozenGroup | None = None
    teacher: FrozenGroup | None = None
    reward: RewardGroup | None = None

    @property
    def members(self) -> list[ActorHandle]:
        """Every process of the run."""
        groups = (self.policy, self.critic, self.reference, self.teacher, self.reward)
        return [*self.rollout.members, *(worker for group in groups if group for worker in group.workers)]

    def end(self) -> None:
        """Every process ends, also where some are dead or busy, and nothing waits for one."""
        self.rollout.close()
        for member in self.members:
            ray.kill(member)


def start_roles(
    config: PPOConfig,
    places: Mapping[str, Bundles],
    on_gpu: bool,
    num_prompts: int,
    texts: SampleStore | None,
) -> Roles:
    """`places`: of each role, see `placement.place`. `num_prompts`: of an episode, from which learning rate
    schedules get their length. `texts`: what the policy learns beside its rewards, None for nothing."""
    reward = RewardGroup(config, places["reward"]) if "reward" in places else None
    rollout = EnginePool(config, places[ENGINES], on_gpu, reward=reward)
    roles = Roles(rollout=rollout, policy=PolicyGroup(config, places["actor"]), reward=reward)
    if "critic" in places:
        roles.critic = CriticGroup(config, places["critic"])
    if "ref" in places:
        path = config.actor.model_name_or_path
        roles.reference = FrozenGroup(
            config, places["ref"], path=path, flag=ACTOR_FLAG, offload=config.ref.offload
        )
    if "teacher" in places and (path := config.teacher.model_name_or_path):
        roles.teacher = FrozenGroup(
            config, places["teacher"], path=path, flag=TEACHER_FLAG, offload=config.teacher.offload
        )
    starting = [rollout.start()]
    if config.engines_sleep and on_gpu:
        starting.pop().result()  # engines size their cache by the memory that is free, so they come first
        rollout.residency.rest()
    updates = num_updates(config, num_prompts, config.frozen_actor_steps)
    starting.append(roles.policy.start(updates, ray.put(texts)))
    if roles.critic:
        starting.append(roles.critic.start(num_updates(config, num_prompts)))
    starting += [model.start() for model in (roles.reference, roles.teacher, roles.reward) if model]
    for start in starting:
        start.result()
    return roles
