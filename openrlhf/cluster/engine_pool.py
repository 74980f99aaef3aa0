"""All rollout engines of a run: implements `Rollout` of backends/base.py with engines in Ray actors."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

import ray
from torch import Tensor

from openrlhf.backends.rollout import EngineOptions, engine_class
from openrlhf.backends.weight_sync.stored_weights import check_adapter
from openrlhf.cluster import environment, folder
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.engine_handle import RayEngineHandle, Request, SamplingTasks
from openrlhf.cluster.engine_memory import EngineMemory
from openrlhf.cluster.pending import Gathered, Handle, first
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.weight_check import WeightCheck
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode, RunError
from openrlhf.rollout.dispatch import Dispatcher
from openrlhf.rollout.worker import RolloutWorker, engine_options, retries_on_other_engine
from openrlhf.types import Metrics, Prompt, PromptGroup, Purpose, Sampled, present
from openrlhf.user_file import UserFiles

if TYPE_CHECKING:  # imports the trainer's libraries: seconds that engine processes save
    from openrlhf.cluster.rank_groups import PolicyRanks, RewardRanks

MAX_CALLS = 4096
"""Maximum number of concurrent calls in an engine actor."""

RANDOM_ADAPTERS = (1, 2)
"""Seeds of the random LoRA adapters with which new engines are checked before they sample."""

CLOSE_TIMEOUT = 10.0
"""Seconds that engines have to shut down before they are killed."""


class EngineActor(RolloutWorker):
    """Ray actor of one engine and the episodes that run on it."""

    def __init__(
        self, config: PPOConfig, options: EngineOptions, files: UserFiles, private: Mapping[str, str]
    ) -> None:
        """`private`: secret variables, see environment.py."""
        folder.enter()
        environment.take(private)
        super().__init__(config.with_references(files.here), options, files)
        self.groups = SamplingTasks(self.run_group)

    async def submit_groups(self, requests: dict[int, Request]) -> None:
        self.groups.submit(requests)

    async def finished_groups(self) -> dict[int, Sampled]:
        return await self.groups.finished()


class EnginePool:
    """All engines of a run. Replacing an engine begins a new epoch; the next sync then rebuilds the
    weight-transfer group."""

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
        self.files = UserFiles.of(config.train.agent, config.reward_function, *config.references.values())
        self.members = [self._create(index) for index in range(config.num_engines)]
        self.epoch = 0
        """Number of times that engines were replaced."""
        self.connected_epoch: int | None = None
        """Epoch for which the weight-transfer group was built; None before the first sync."""
        self.memory = EngineMemory(self.members, config.engines_sleep)
        self.dispatcher = Dispatcher(
            [RayEngineHandle(member) for member in self.members],
            {"train": config.rollout.n_samples_per_prompt, "eval": config.eval.n_samples_per_prompt},
            memory=self.memory,
            longest=config.longest_response,
            score=reward.score if reward else None,
            scores_at_once=not (config.engines_colocated and on_gpu),
            retry_on=config.rollout.retry_on if retries_on_other_engine(config) else (),
        )
        self.num_syncs = 0
        """Number of weight syncs in this epoch."""
        self.check = WeightCheck(config, self.members, on_gpu)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="sync")

    def _create(self, index: int) -> Handle:
        placed, devices = self.bundles.engine_options(index, self.options.num_workers)
        env_vars = engine_class(self.options).environment(self.options) | devices
        actor = ray.remote(EngineActor).options(
            **placed, runtime_env={"env_vars": env_vars}, max_concurrency=MAX_CALLS
        )
        return actor.remote(self.config, self.options, self.files, environment.private())

    def start(self, free_fraction: float | None = None) -> Gathered[None]:
        """Builds the model in every engine. `free_fraction`: see `RolloutEngine.start`."""
        return Gathered([member.start.remote(free_fraction) for member in self.members], first)

    def sleep_between(self) -> None:
        """If the run enables sleep, offloads the engines, and from now on whenever models on their GPUs
        compute."""
        if self.config.engines_sleep:
            self.memory.sleep()
            self.bundles.devices.release = self.dispatcher.sleep

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        self.dispatcher.submit(prompts, purpose)

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        try:
            group = self.dispatcher.next_group(purpose, timeout)
        except TimeoutError as error:
            text, value = f"no prompt finished in this time. {error}", f"{timeout:g}"
            raise RunError(ErrorCode.EPISODES_FAILED, text, flag="--rollout.timeout", value=value) from None
        self._take_answers()
        return group

    def sync(self, policy: "PolicyRanks", version: int) -> Future[Metrics]:
        return self.thread.submit(self._sync, policy, version)

    def close(self) -> None:
        """Shuts down the engines that still answer, and their reward processes."""
        self.dispatcher.close()
        self.thread.shutdown(wait=False, cancel_futures=True)
        refs = [member.close.remote() for member in self.members]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT)

    def _sync(self, policy: "PolicyRanks", version: int) -> Metrics:
        with nullcontext() if self.config.train.partial_rollout_enable else self.dispatcher.paused():
            return self._send_weights(policy, version)

    def _send_weights(self, policy: "PolicyRanks", version: int) -> Metrics:
        """Sends the weights, and checks the engines' log-probs if a check is due. Returns the metrics of
        checks since the last sync."""
        self._take_answers()
        metrics = self.check.take_metrics()
        is_new = self.connected_epoch != self.epoch
        if is_new:
            client = RayEngineClient(self.members, self.options.num_workers)
            policy.open_weight_sync(client, self.options.transfer_backend).result()
            self.connected_epoch, self.num_syncs = self.epoch, 0
        self.memory.wake_for_sync()
        sleeps, every = self.config.engines_sleep, self.config.vllm.sync_check_steps
        is_due = sleeps or self.num_syncs % every == 0
        self.num_syncs += 1
        if not is_due:
            policy.send_weights(version).result()
            return metrics
        plain = self._send_and_ask(policy, version)
        if is_new or sleeps:  # engines must answer before they sleep
            self.check.take_answers(wait=True)
        if is_new and self.options.lora is not None:
            self._check_adapters(policy, version, plain)
        return metrics

    def _send_and_ask(self, policy: "PolicyRanks", version: int, adapter_seed: int | None = None) -> Tensor:
        """Sends the weights and the probe. Returns the trainer's log-probs of the probe, (L - 1,).
        `adapter_seed`: seed of a random adapter that is sent instead of the policy's."""
        trainer = present(policy.send_weights(version, self.check.probe, adapter_seed).result())
        self.memory.wake()
        self.check.ask(policy, version, trainer)
        return trainer

    def _check_adapters(self, policy: "PolicyRanks", version: int, plain: Tensor) -> None:
        """Checks that engines apply adapters, and replace them: sends two random adapters, and then the
        policy's again. The policy's adapter starts at zero and grows slowly, so the ordinary check would not
        notice an engine that ignores it for many steps. `plain`: the trainer's log-probs with the policy's
        adapter."""
        for seed in RANDOM_ADAPTERS:
            adapted = self._send_and_ask(policy, version, seed)
            check_adapter(plain, adapted, self.check.limit)
            self.check.take_answers(wait=True)
        self._send_and_ask(policy, version)
        self.check.take_answers(wait=True)

    def _take_answers(self) -> None:
        """Compares the engines' answers to the probe. With partial rollouts it does not wait for them,
        because a probe may queue behind requests in flight."""
        self.check.take_answers(wait=not self.config.train.partial_rollout_enable)
