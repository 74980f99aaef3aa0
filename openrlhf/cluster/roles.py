"""The roles of a run: every engine and model, placed, loaded, and with weights flowing between them."""

from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from openrlhf.cluster.engine_pool import EnginePool
from openrlhf.cluster.group import CriticGroup, FrozenGroup, PolicyGroup, RewardGroup
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
        return [*self.rollout.engines, *(worker for group in groups if group for worker in group.workers)]

    def end(self) -> None:
        """Every process ends, also where some are dead or busy, and nothing waits for one."""
        self.rollout.close()
        for member in self.members:
            ray.kill(member)
        self.rollout.thread.shutdown(cancel_futures=True)


def start_roles(
    config: PPOConfig,
    places: tuple[dict[str, Bundles], Bundles],
    on_gpu: bool,
    num_prompts: int,
    texts: SampleStore | None,
) -> Roles:
    """`places`: of each role, and of the engines, see `placement.place`. `num_prompts`: of an episode, from
    which learning rate schedules get their length. `texts`: what the policy learns beside its rewards, None
    for nothing."""
    bundles, engine_bundles = places
    rollout = EnginePool(config, engine_bundles, on_gpu)
    roles = Roles(rollout=rollout, policy=PolicyGroup(config, bundles["actor"]))
    if "critic" in bundles:
        roles.critic = CriticGroup(config, bundles["critic"])
    if "ref" in bundles:
        path = config.actor.model_name_or_path
        roles.reference = FrozenGroup(
            config, bundles["ref"], path=path, flag=ACTOR_FLAG, offload=config.ref.offload
        )
    if "teacher" in bundles and (path := config.teacher.model_name_or_path):
        roles.teacher = FrozenGroup(
            config, bundles["teacher"], path=path, flag=TEACHER_FLAG, offload=config.teacher.offload
        )
    if "reward" in bundles:
        roles.reward = RewardGroup(config, bundles["reward"])
        rollout.judge = roles.reward.score
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
    rollout.connect(roles.policy)
    return roles
