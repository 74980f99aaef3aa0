"""Starts all roles of a run: engines and models."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from openrlhf.backends.peak_memory import memory_metrics
from openrlhf.cluster.engine_memory import free_fraction
from openrlhf.cluster.engine_pool import EnginePool
from openrlhf.cluster.layout import ENGINES
from openrlhf.cluster.pending import STALL, Gathered, results
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.process_exits import explaining_exits
from openrlhf.cluster.rank_groups import (
    AdapterDisabledReference,
    CriticRanks,
    FrozenRanks,
    PolicyRanks,
    RankGroup,
    RewardRanks,
)
from openrlhf.cluster.watchdog import Board, Watchdog
from openrlhf.config.ppo import ACTOR_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.data.store import SampleStore
from openrlhf.errors import counted, notify
from openrlhf.observability.startup import StartClock
from openrlhf.observability.waits import waiting
from openrlhf.types import Metrics

# bounded .result(): watchdog.py ends calls to processes that make no progress; long waits are reported.


@dataclass(kw_only=True, slots=True)
class Roles:
    """All engines and models of a run. A role that the run does not have is None."""

    rollout: EnginePool
    policy: PolicyRanks
    critic: CriticRanks | None = None
    reference: FrozenRanks | AdapterDisabledReference | None = None
    teacher: FrozenRanks | None = None
    reward: RewardRanks | None = None

    @property
    def models(self) -> dict[str, RankGroup]:
        """The models with processes of their own, by name."""
        groups = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
            "teacher": self.teacher,
            "reward models": self.reward,
        }
        return {name: g for name, g in groups.items() if g and not isinstance(g, AdapterDisabledReference)}

    @property
    def processes(self) -> dict[str, list[ActorHandle]]:
        """Processes of each role, in the order of ranks."""
        return {ENGINES: self.rollout.members} | {name: m.workers for name, m in self.models.items()}

    @property
    def members(self) -> list[ActorHandle]:
        """All processes of the run."""
        return [process for own in self.processes.values() for process in own]

    def free_fraction(self, gpus_per_engine: int) -> float:
        """Returns `engine_memory.free_fraction` of the engines' GPUs. All models must have started on these
        GPUs."""
        memory = {name: model.memory() for name, model in self.models.items()}
        return free_fraction(memory, self.policy.weight_bytes() // gpus_per_engine)

    def peak_memory(self) -> Gathered[Metrics]:
        """Returns the metrics of peak memory since the last call, see `memory_metrics`."""
        engines = self.rollout.engines.call("peak_memory")
        ranks = [rank.peak_memory.remote() for model in self.models.values() for rank in model.workers]
        return Gathered(ranks, lambda peaks: memory_metrics([*engines.result().values(), *peaks]))

    def watchdog(self, config: PPOConfig, *, starting: bool = False) -> Watchdog:
        """Returns a watchdog of all processes. An engine that hangs is replaced; a rank that hangs is killed,
        so that the calls that the run waits for fail. `starting`: the processes load their models. Engines
        are like ranks then, because no other engine can take their place yet."""

        def processes() -> Mapping[str, Sequence[ActorHandle | None]]:
            return self.processes if starting else self.processes | {ENGINES: self.rollout.watched}

        def give_up(role: str, index: int, member: ActorHandle, reason: str) -> None:
            if role == ENGINES and not starting:
                self.rollout.give_up(index, member, reason)
                return
            try:
                notify(f"{reason}.\nThe run ends. Stacks of all processes: {watchdog.write_stacks()}")
            finally:  # also on a full disk
                ray.kill(member)

        engines, ranks = config.rollout.engine_timeout, config.train.rank_timeout
        limits = lambda role: engines if role == ENGINES and not starting else ranks
        watchdog = Watchdog(processes, limits, give_up, config.run_dir, Board(), needs_progress=not starting)
        return watchdog

    def end(self) -> None:
        """Ends all processes, without waiting for dead or busy ones."""
        self.rollout.close()
        for member in self.members:
            ray.kill(member)
        Board().clear()


def start_roles(
    config: PPOConfig,
    places: Mapping[str, Bundles],
    on_gpu: bool,
    updates: int,
    critic_updates: int,
    texts: SampleStore | None,
    clock: StartClock | None = None,
) -> Roles:
    """Creates and loads all engines and models. `places`: bundles of each role, see `placement.place`.
    `updates`, `critic_updates`: optimizer steps of the whole run, which determine the schedules of learning
    rates. `texts`: pre-training texts of PPO-ptx; None: no texts. `clock`: gets the seconds until all engines
    and until all models have loaded."""
    began = time.monotonic()
    reward = RewardRanks(config, places["reward"]) if "reward" in places else None
    rollout = EnginePool(config, places[ENGINES], on_gpu, reward=reward)
    roles = Roles(rollout=rollout, policy=PolicyRanks(config, places["actor"]), reward=reward)
    if "critic" in places:
        roles.critic = CriticRanks(config, places["critic"])
    if "ref" in places:
        roles.reference = FrozenRanks(config, places["ref"])
    elif config.uses_reference and config.learns:
        roles.reference = AdapterDisabledReference(roles.policy)
    if "teacher" in places:
        roles.teacher = FrozenRanks(config, places["teacher"])
    engines, key = counted(config.num_engines, "rollout engine"), config.actor.model_name_or_path
    title = f"starting {engines}, loading {', '.join(config.placements)}"
    watchdog = roles.watchdog(config, starting=True)
    with explaining_exits(), waiting(title, key=key), closing(watchdog):
        watchdog.start()
        # vLLM measures the GPU's memory when it starts, so models on the same GPU must be loaded before.
        engines_come_last = config.engines_colocated and on_gpu
        engines = [] if engines_come_last else [rollout.start()]
        models = [roles.policy.start(updates, ray.put(texts))]
        if roles.critic:
            models.append(roles.critic.start(critic_updates))
        if isinstance(roles.reference, FrozenRanks):
            models.append(roles.reference.start(key, ACTOR_FLAG, config.ref.offload))
        if roles.teacher:
            path = config.teacher.model_name_or_path
            models.append(roles.teacher.start(path, TEACHER_FLAG, config.teacher.offload))
        if roles.reward:
            models.append(roles.reward.start())
        _wait_for({"engines": engines, "models": models}, began, clock)
        if engines_come_last:
            began = time.monotonic()
            _wait_for({"engines": [rollout.start(roles.free_fraction(config.vllm.num_gpus))]}, began, clock)
    rollout.sleep_between()
    return roles


def _wait_for(starts: Mapping[str, Sequence[Gathered]], began: float, clock: StartClock | None) -> None:
    """Waits for all starts. `starts`: pending starts by the stage of the clock that they belong to; `began`:
    time.monotonic() at which their processes were created."""
    pending = {name: [ref for start in own for ref in start.refs] for name, own in starts.items() if clock}
    while clock and (refs := [ref for own in pending.values() for ref in own]):
        done, _ = ray.wait(refs, timeout=STALL)
        if not done:  # `result` reports who waits for whom
            break
        results(done)  # raises at once what made a start fail: other ranks may wait for this one for ever
        name = next(name for name, own in pending.items() if done[0] in own)
        pending[name].remove(done[0])
        if not pending[name]:
            clock.add(name, time.monotonic() - began)
    for start in (start for own in starts.values() for start in own):
        start.result()
