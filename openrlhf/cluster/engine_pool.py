"""All rollout engines of a run: implements `Rollout` of backends/base.py with engines in Ray actors."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from openrlhf.backends.rollout import EngineDied, EngineOptions, engine_class
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.backends.weight_sync.stored_weights import check_adapter
from openrlhf.cluster import environment
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.engine_handle import RayEngineHandle, Request, SamplingTasks
from openrlhf.cluster.engine_memory import EngineMemory
from openrlhf.cluster.engine_supervisor import EngineSupervisor
from openrlhf.cluster.pending import Gathered, Handle, actor_names, first
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.process_exits import dead_among, find_cause
from openrlhf.cluster.watchdog import start_heartbeat
from openrlhf.cluster.weight_check import WeightCheck
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode, RunError
from openrlhf.rollout.dispatch import Dispatcher
from openrlhf.rollout.worker import RolloutWorker, engine_options, group_sizes, retries_on_other_engine
from openrlhf.types import Metrics, Prompt, PromptGroup, Purpose, Sampled, not_none
from openrlhf.user_file import UserFiles

if TYPE_CHECKING:  # imports the trainer's libraries: seconds that engine processes save
    from openrlhf.cluster.rank_groups import PolicyRanks, RewardRanks

# bounded .result(): watchdog.py ends calls to processes that make no progress.

MAX_CALLS = 4096
"""Maximum number of concurrent calls in an engine actor."""

RANDOM_ADAPTERS = (1, 2)
"""Seeds of the random LoRA adapters with which new engines are checked before they sample."""

POLL = 1.0
"""Seconds between two checks whether a replaced engine has started."""

RESTARTS = "rollout/engine_restarts"
"""Metric: number of engines replaced since the previous step; logged only if there is one."""

CLOSE_TIMEOUT = 10.0
"""Seconds that engines have to shut down before they are killed."""


class EngineActor(RolloutWorker):
    """Ray actor of one engine and the episodes that run on it."""

    def __init__(
        self, config: PPOConfig, options: EngineOptions, files: UserFiles, private: Mapping[str, str]
    ) -> None:
        """`private`: secret variables, see environment.py."""
        environment.enter(private)
        super().__init__(config.with_references(files.here), options, files)
        self.groups = SamplingTasks(self.run_group)
        start_heartbeat(self.engine.progress, self.engine.queue)

    async def submit_groups(self, requests: dict[int, Request]) -> None:
        self.groups.submit(requests)

    async def finished_groups(self) -> dict[int, Sampled]:
        return await self.groups.finished()


class EnginePool:
    """All engines of a run. Those that die are replaced, see engine_supervisor.py."""

    def __init__(
        self,
        config: PPOConfig,
        bundles: Bundles,
        on_gpu: bool,
        *,
        reward: "RewardRanks | None" = None,
        from_files: bool = False,
    ) -> None:
        """Creates the engines' processes; `start` builds the models. `from_files`: load the weights from the
        model's files; otherwise the first `sync` sets them. `reward`: reward models that score the sampled
        groups."""
        self.config, self.on_gpu, self.bundles = config, on_gpu, bundles
        self.options = engine_options(config, on_gpu, from_files=from_files)
        self.files = UserFiles.of(*config.users_files)
        self.free_fraction: float | None = None
        """Argument of the engines' `start`."""
        self.num_samples = group_sizes(config)
        """Number of samples of a prompt."""
        self.engines = EngineSupervisor(
            config.num_engines,
            create=self._create,
            start=lambda member: member.start.remote(self.free_fraction),
            lose=lambda number: self.dispatcher.lose(number),
            fail=lambda error: self.dispatcher.fail(error),
        )
        self.connected: list[Handle] = []
        """The engines of the open weight-transfer group; empty before the first sync."""
        self.sent: tuple[PolicyRanks, int] | None = None
        """The policy, and the version of its weights that the engines hold. None before the first sync."""
        self.memory = EngineMemory(self.engines.call, config.engines_sleep)
        self.dispatcher = Dispatcher(
            [RayEngineHandle(member) for member in self.engines.members],
            self.num_samples,
            memory=self.memory,
            longest=config.longest_response,
            score=reward.score if reward else None,
            scores_at_once=not (config.engines_colocated and on_gpu),
            retry_on=config.rollout.retry_on if retries_on_other_engine(config) else (),
            is_replaced=lambda number, engine, error: self.engines.report(number, engine.engine, error),
        )
        self.num_syncs = 0
        """Number of weight syncs with the open weight-transfer group."""
        self.check = WeightCheck(config, self.engines, on_gpu)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="sync")

    def _create(self, index: int) -> Handle:
        placed, devices = self.bundles.engine_options(index, self.options.num_workers)
        env_vars = engine_class(self.options).environment(self.options) | devices
        actor = ray.remote(EngineActor).options(
            **placed, runtime_env={"env_vars": env_vars}, max_concurrency=MAX_CALLS
        )
        member: Handle = actor.remote(self.config, self.options, self.files, environment.private())
        actor_names[member._actor_id.hex()] = f"engine {index}"
        return member

    @property
    def members(self) -> list[Handle]:
        """The engines' processes."""
        return self.engines.members

    def start(self, free_fraction: float | None = None) -> Gathered[None]:
        """Builds the model in every engine. `free_fraction`: see `RolloutEngine.start`."""
        self.free_fraction = free_fraction
        return Gathered([member.start.remote(free_fraction) for member in self.members], first)

    def sleep_between(self) -> None:
        """Offloads the engines, if the run lets them sleep, and from then on whenever models on their GPUs
        compute."""
        if self.config.engines_sleep:
            self.memory.sleep()
            self.bundles.devices.release = self.dispatcher.sleep

    def set_sampling(self, flags: Mapping[str, Any]) -> None:
        """Sets flags that say how later prompts are sampled, also in engines that start now or later."""
        if (config := with_values(self.config, flags)) == self.config:
            return
        self.config = config  # with which engines are created
        self.num_samples.update(group_sizes(config))
        for number in set(range(len(self.members))) - set(self.engines.serving):
            self.members[number].set_sampling.remote(flags)
        self.engines.call("set_sampling", flags).result()

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.dispatcher.submit(prompts, purpose)

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        started = time.monotonic()
        self._replace_dead()
        while (group := self._group_until(purpose, started, timeout)) is None:
            self._replace_dead()
        self._take_answers()
        return group

    def _group_until(self, purpose: Purpose, started: float, timeout: float | None) -> PromptGroup | None:
        """Returns the next finished group; None if none finishes within POLL seconds. Raises RunError
        `timeout` seconds after the start, or after the last group of any purpose: an evaluation waits behind
        the training prompts that are sampled ahead."""
        last = max(started, self.dispatcher.finished_at)
        left = POLL if timeout is None else last + timeout - time.monotonic()
        try:
            return self.dispatcher.next_group(purpose, max(0.0, min(POLL, left)))
        except TimeoutError as error:
            if left > 0:
                return None
            text, value = f"no prompt finished in this time. {error}", f"{self.config.rollout.timeout:g}"
            raise RunError(ErrorCode.EPISODES_FAILED, text, flag="--rollout.timeout", value=value) from None

    def _replace_dead(self) -> None:
        """Starts successors of dead engines, and admits those that have loaded their model. The policy still
        has the weights that were sent last, because the caller waits for samples."""
        if self.engines.all_serve or not self.memory.is_awake:
            return
        self.engines.begin_restarts()
        for number in self.engines.started():
            if self.sent is not None:
                policy, version = self.sent
                self._send(policy, version, [number], is_due=True)
            self._admit([number])

    def _admit(self, numbers: Sequence[int]) -> None:
        """Lets new engines serve, unless they died meanwhile."""
        for number in numbers:
            if self.engines.serve(number):
                self.dispatcher.replace(number, RayEngineHandle(self.members[number]))

    def sync(self, policy: "PolicyRanks", version: int) -> Future[Metrics]:
        return self.thread.submit(self._sync, policy, version)

    @property
    def watched(self) -> list[Handle | None]:
        """The engines' processes; None in the place of an engine that is dead or loads its model."""
        loaded = self.engines.loaded
        return [member if i in loaded else None for i, member in enumerate(self.members)]

    def give_up(self, number: int, member: Handle, reason: str) -> None:
        """Kills an engine that hangs; all calls to it fail, and it is replaced."""
        self.engines.give_up(number, member, reason)
        ray.kill(member)

    def close(self) -> None:
        """Shuts down the engines that still answer, and their reward processes."""
        self.dispatcher.close()
        self.thread.shutdown(wait=False, cancel_futures=True)
        refs = [self.members[i].close.remote() for i in self.engines.serving]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT)

    def _sync(self, policy: "PolicyRanks", version: int) -> Metrics:
        with nullcontext() if self.config.train.partial_rollout_enable else self.dispatcher.paused():
            self._take_answers()
            metrics = self.check.take_metrics()
            while not self._is_sent(policy, version):
                self.engines.begin_restarts()
                time.sleep(POLL)
        if count := self.engines.take_restarts():
            metrics[RESTARTS] = float(count)
        return metrics

    def _is_sent(self, policy: "PolicyRanks", version: int) -> bool:
        """Sends the weights to the serving engines and to new ones, which serve afterwards. Returns False if
        an engine died meanwhile, or if there is none."""
        new = self.engines.started()
        numbers = sorted([*self.engines.serving, *new])
        self.memory.wake(["weights"])
        is_due = self.config.engines_sleep or self.num_syncs % self.config.vllm.sync_check_steps == 0
        if not numbers or not self._send(policy, version, numbers, is_due=is_due):
            return False
        self.sent = policy, version
        self._admit(new)
        return True

    def _send(self, policy: "PolicyRanks", version: int, numbers: Sequence[int], *, is_due: bool) -> bool:
        """Sends the weights to the engines with these numbers, with the weight check if they are newly
        connected or the check is due. Returns False where one of them died."""
        members = [self.members[i] for i in numbers]
        is_new = self.connected != members
        try:
            if is_new:
                client = RayEngineClient(members, self.options.num_workers)
                policy.open_weight_sync(client, self.options.transfer_backend).result()
                self.connected, self.num_syncs = members, 0
            self.num_syncs += 1
            if is_new or is_due:
                self._send_checked(policy, version, numbers, is_new=is_new)
            else:
                policy.send_weights(version).result()
        except RayError as error:
            self.connected = []
            if not self._report_deaths(error, numbers):
                raise
        return not any(self.engines.is_dead(number) for number in numbers)

    def _report_deaths(self, error: RayError, numbers: Sequence[int]) -> bool:
        """Reports the engines whose death made a weight sync fail. `numbers`: the engines that took part.
        Returns False if the sync failed for another reason."""
        members = [self.members[i] for i in numbers]
        failed = find_cause(error)
        if not isinstance(failed, EnginesFailedError):
            deaths: Mapping[int, BaseException] = dead_among(members)
        elif failed.failures.keys() - failed.dead:  # an engine that lives loaded wrong weights
            return False
        else:
            deaths = {i: EngineDied(failed.code, failed.failures[i]) for i in failed.dead}
        for i, death in deaths.items():
            self.engines.report(numbers[i], members[i], death)
        return any(self.engines.is_dead(number) for number in numbers)

    def _send_checked(
        self, policy: "PolicyRanks", version: int, numbers: Sequence[int], *, is_new: bool
    ) -> None:
        """Sends the weights, and requests the engines' log-probs of the probe. New engines that apply
        adapters then get a random adapter, a second one in its place, and the policy's again: adapters begin
        at zero and grow slowly, so an engine that ignores them would pass the other checks for many
        steps."""
        adapters = (*RANDOM_ADAPTERS, None) if is_new and self.options.lora is not None else ()
        plain: Tensor | None = None
        for seed in (None, *adapters):
            trainer = not_none(policy.send_weights(version, self.check.probe, seed).result())
            self.memory.wake()
            self.check.ask(policy, version, trainer, numbers)
            if seed is None:
                plain = trainer
            else:
                check_adapter(not_none(plain), trainer, self.check.limit)
            if is_new or self.config.engines_sleep:  # an engine must answer before it may sleep
                self.check.take_answers(wait=True, of=numbers)

    def _take_answers(self) -> None:
        """Compares the engines' answers to the probe. With partial rollouts it does not wait for them,
        because a probe may queue behind requests in flight."""
        self.check.take_answers(wait=not self.config.train.partial_rollout_enable)
