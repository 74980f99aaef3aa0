"""All the samplers together: engine/interfaces.py's Rollout over vLLM engines in Ray actors."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from openrlhf.cluster import folder
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.pending import Gathered, first
from openrlhf.cluster.placement import Bundles
from openrlhf.cluster.residency import Residency
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serve_rm import KEY_VARIABLE
from openrlhf.engine.stored_weights import PROBE_TOKENS, EngineProbe, check_stored, probe_of
from openrlhf.engine.vllm_engine import EngineOptions, VLLMEngine, engine_environment
from openrlhf.models.loading import policy_tokenizer, stop_token_ids
from openrlhf.rewards.function import NoReward, RewardFunction
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rollout.agents import UserExecutor
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.generator import generate
from openrlhf.types import Group, Prompt, Trajectory
from openrlhf.utils.agent import SingleTurnAgentExecutor

if TYPE_CHECKING:  # an engine's process needs no trainer, whose libraries take seconds to import
    from openrlhf.cluster.group import PolicyGroup

MAX_CALLS = 4096
"""Calls that an engine actor runs at a time."""


CLOSE_TIMEOUT = 10.0
"""Seconds that an engine may take to end by itself."""


class EngineActor(VLLMEngine):
    """An engine, and the episodes that run on it, in one process."""

    def __init__(self, config: PPOConfig, options: EngineOptions, reward_key: str | None = None) -> None:
        """`reward_key`: of the reward servers."""
        folder.enter()
        super().__init__(options)
        self.config, self.reward_key = config, reward_key

    async def start(self) -> None:
        await super().start()
        config, path = self.config, self.config.actor.model_name_or_path
        tokenizer = policy_tokenizer(config)
        self.reward = self._build_reward()
        executor = SingleTurnAgentExecutor(self.reward, is_chat=config.data.apply_chat_template)
        if agent := config.train.agent_func_path:
            executor = await UserExecutor.load(agent)
        self.runner = EpisodeRunner(
            self,
            tokenizer,
            executor,
            stop_token_ids(path, tokenizer),
            timeout=config.rollout.episode_timeout,
            retries=config.rollout.retries,
            reward_is_optional=config.uses_reward_model or config.uses_teacher,
        )
        self.samplings = {
            s.purpose: s for s in (Sampling.for_training(config), Sampling.for_evaluation(config))
        }

    def _build_reward(self) -> RewardFunction | RemoteReward | NoReward:
        reward = self.config.reward
        if self.config.train.agent_func_path:
            return NoReward()
        if path := self.config.reward_function_path:
            return RewardFunction(
                path, timeout=reward.timeout, num_workers=reward.num_workers, batch_size=reward.batch
            )
        if reward.servers:
            return RemoteReward(
                reward.servers,
                timeout=reward.remote_timeout,
                batch_size=reward.remote_batch_size,
                concurrency=reward.remote_concurrency,
                key=self.reward_key,
            )
        return NoReward()  # with a teacher, the checks of config/ saw to it

    async def run_group(self, prompt: Prompt, purpose: str) -> Group:
        """All samples of one prompt; `purpose` is train or eval."""
        return await self.runner.run_group(prompt, self.samplings[purpose])

    async def probe(self, token_ids: list[int]) -> EngineProbe:
        return EngineProbe(
            log_probs=await self.log_probs(token_ids), unwritten=await self.unwritten_parameters()
        )

    async def close(self) -> None:
        self.reward.close()
        self.shutdown()


def engine_options(config: PPOConfig, on_gpu: bool, *, from_files: bool = False) -> EngineOptions:
    """Without weights `from_files` an engine holds random ones until the first sync: none that it could
    keep."""
    return EngineOptions(
        model=config.actor.model_name_or_path,
        dtype=config.ds.param_dtype,
        max_len=config.data.max_len,
        seed=config.train.seed,
        transfer_backend=transfer_backend(config, on_gpu),
        on_gpu=on_gpu,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=config.vllm.enforce_eager,
        enable_sleep=config.engines_sleep and on_gpu,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_gb=config.vllm.kv_cache_gb,
        load_weights=from_files,
    )


def transfer_backend(config: PPOConfig, on_gpu: bool) -> str:
    """Shared memory where trainer and engines share GPUs, else the network; without GPUs NCCL cannot run."""
    if not on_gpu:
        return "gloo"
    return (
        "ipc"
        if config.train.colocate_all and config.vllm.sync_backend == "nccl"
        else config.vllm.sync_backend
    )


class EnginePool:
    def __init__(
        self, config: PPOConfig, bundles: Bundles, on_gpu: bool, *, from_files: bool = False
    ) -> None:
        """Creates the engines' processes; `start` builds the model, with its weights `from_files` or for
        `load_weights` to fill."""
        self.config, self.on_gpu = config, on_gpu
        start_options = engine_options(config, on_gpu, from_files=from_files)
        environment = engine_environment(start_options)
        tensor_parallel_size = config.vllm.tensor_parallel_size
        self.engines: list[Any] = []  # actor handles, whose methods Ray does not type
        for i in range(config.num_engines):
            options, devices = bundles.engine_options(i, tensor_parallel_size)
            runtime_env = {"env_vars": environment | devices}
            actor = ray.remote(EngineActor).options(
                **options, runtime_env=runtime_env, max_concurrency=MAX_CALLS
            )
            # The key from here: on another machine the variable is not set.
            self.engines.append(actor.remote(config, start_options, os.environ.get(KEY_VARIABLE)))
        self.client = RayEngineClient(self.engines, tensor_parallel_size)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self.on_finished: Callable[[list[Trajectory]], None] = lambda group: None
        """Hears of each prompt's samples as they finish."""
        self.judge: Callable[[list[Trajectory]], list[Trajectory]] = lambda trajectories: trajectories
        """Adds the rewards of reward models."""
        self.residency = Residency(self.engines, config.engines_sleep and on_gpu)
        self.is_checked = False
        """The engines have shown that they compute with the weights that they were sent."""

    def start(self) -> Gathered[None]:
        return Gathered([engine.start.remote() for engine in self.engines], first)

    def connect(self, policy: "PolicyGroup") -> None:
        """Open the way for weights from `policy`. Both have started."""
        policy.open_weight_sync(self.client, transfer_backend(self.config, self.on_gpu)).result()

    def generate(self, prompts: Sequence[Prompt]) -> Future[list[Trajectory]]:
        return self.thread.submit(self._run, prompts, "train", self.config.rollout.n_samples_per_prompt)

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[list[Trajectory]]:
        return self.thread.submit(self._run, prompts, "eval", self.config.eval.n_samples_per_prompt)

    def load_weights(self, policy: "PolicyGroup", version: int) -> Future[None]:
        return self.thread.submit(self._load_weights, policy, version)

    def close(self) -> None:
        """Stop the engines and their reward processes, those that answer."""
        refs = [engine.close.remote() for engine in self.engines]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT)

    def _run(self, prompts: Sequence[Prompt], purpose: str, num_samples: int) -> list[Trajectory]:
        samplers = [_Sampler(engine) for engine in self.engines]
        with self.residency.generating():
            trajectories = generate(
                prompts, samplers, purpose=purpose, num_samples=num_samples, on_finished=self.on_finished
            )
        return self.judge(trajectories)

    def _load_weights(self, policy: "PolicyGroup", version: int) -> None:
        with self.residency.syncing():
            policy.send_weights(version).result()
        if not self.is_checked:
            self._check_stored(policy)
            self.is_checked = True

    def _check_stored(self, policy: "PolicyGroup") -> None:
        length = min(PROBE_TOKENS, self.config.data.max_len - 1)
        sample = probe_of(policy_tokenizer(self.config), length)
        with self.residency.generating():
            answers = ray.get([e.probe.remote(sample.token_ids.tolist()) for e in self.engines])
        check_stored(policy.probe(sample).result(), answers, self.config.ds.param_dtype)


class _Sampler:
    def __init__(self, engine: ActorHandle) -> None:
        self.engine = engine

    def run_group(self, prompt: Prompt, purpose: str) -> Future[list[Trajectory]]:
        return self.engine.run_group.remote(prompt, purpose).future()
