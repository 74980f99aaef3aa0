"""The work of an engine's process: it runs episodes on the engine and requests their rewards.

cluster/engine_pool.py runs it in a Ray actor; this module does not depend on Ray.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.agents.base import AgentExecutorBase, SingleTurnAgentExecutor
from openrlhf.backends.peak_memory import Peaks
from openrlhf.backends.rollout import MAX_LOGPROBS, EngineOptions, engine_class
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, Probe, WeightFingerprint
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import ACTOR_FLAG, PPOConfig
from openrlhf.config.sections import KEY_VARIABLE, LoraConfig
from openrlhf.config.speculation import parse_speculation
from openrlhf.data.pictures import decoded
from openrlhf.device import DEVICE_TYPE
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.lora import adapted_layers
from openrlhf.models.tokenizers import policy_processor
from openrlhf.rewards.function import NoReward, RewardFunction
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.text import image_placeholder_ids, text_tokenizer
from openrlhf.types import Prompt, Purpose, Sampled
from openrlhf.user_file import UserFiles


class RolloutWorker:
    """An engine and the episodes that run on it, in one process."""

    def __init__(self, config: PPOConfig, options: EngineOptions, files: UserFiles) -> None:
        self.engine = engine_class(options)(options)
        self.config, self.files = config, files

    async def start(self, free_fraction: float | None = None) -> None:
        """Starts the engine and loads the agent and the source of rewards. `free_fraction`: see
        `RolloutEngine.start`."""
        await self.engine.start(free_fraction)
        config, path = self.config, self.config.actor.model_name_or_path
        processor = policy_processor(config)
        tokenizer = text_tokenizer(processor)
        self.rewards: list[RewardFunction | RemoteReward | NoReward] = []
        executor = await self._build_executor(config, processor)
        self.runner = EpisodeRunner(
            self.engine,
            processor,
            executor,
            stop_token_ids(path, tokenizer),
            timeout=config.rollout.episode_timeout,
            retries=config.rollout.retries - int(retries_on_other_engine(config)),
            retry_on=config.rollout.retry_on,
            max_concurrent=config.rollout.max_concurrent_episodes,
            reward_is_optional=config.uses_reward_model or config.uses_teacher,
            image_token_ids=image_placeholder_ids(processor) if config.reads_images else (),
        )
        tasks = {*config.task_values("reward"), *config.task_values("agent")}
        self.runners = {
            task: self.runner.with_executor(await self._build_executor(config.for_source(task), processor))
            for task in sorted(tasks)
        }
        await self.set_sampling({})

    async def _build_executor(self, config: PPOConfig, processor: Any) -> AgentExecutorBase:
        """Loads the agent, or the source of rewards, of a run or of one of its tasks."""
        self.rewards.append(reward := self._build_reward(config))
        if not (agent := config.train.agent):
            return SingleTurnAgentExecutor(reward, is_chat=config.data.apply_chat_template)
        return await UserExecutor.load(
            self.files.here(agent),
            AgentSetting(
                tokenizer=processor,
                max_length=config.data.max_len,
                max_turns=config.train.max_turns,
                step_timeout=config.rollout.step_timeout,
            ),
        )

    def _build_reward(self, config: PPOConfig) -> RewardFunction | RemoteReward | NoReward:
        reward = config.reward
        if config.train.agent_func_path:
            return NoReward()
        if function := config.reward_function:
            return RewardFunction(
                self.files.here(function),
                timeout=reward.timeout,
                num_workers=reward.num_workers,
                batch_size=reward.batch,
                memory_gb=reward.memory_gb,
            )
        if reward.servers:
            return RemoteReward(
                reward.servers,
                timeout=reward.remote_timeout,
                try_timeout=reward.remote_try_timeout,
                batch_size=reward.remote_batch_size,
                concurrency=reward.remote_concurrency,
                key=os.environ.get(KEY_VARIABLE),
            )
        return NoReward()  # the checks in config/ allow this with a reward model or teacher only

    async def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Sampled:
        """Runs the samples of one prompt; see `EpisodeRunner`."""
        runner, sampling = self.runners.get(prompt.source, self.runner), self.samplings[purpose]
        if purpose == "train":
            sampling = replace(sampling, temperature=self.config.temperature(prompt.source))
        group = await runner.run_group(prompt, sampling, samples)
        return Sampled(group=group, done=self.runner.done.copy())

    async def set_sampling(self, flags: Mapping[str, Any]) -> None:
        """Sets flags that say how later prompts are sampled."""
        self.config = with_values(self.config, flags)
        train, most = Sampling.for_training(self.config), self.engine.vocabulary
        kept, likely = min(train.max_kept_tokens, most), min(train.num_likely, most)
        train = replace(train, max_kept_tokens=kept, num_likely=likely)
        self.samplings = {s.purpose: s for s in (train, Sampling.for_evaluation(self.config))}

    async def answer(self, probe: Probe) -> EngineProbe:
        """Computes the log-probs of a weight sync's probe."""
        return await self.engine.probe(probe.asked, [decoded(image.data) for image in probe.images])

    async def close(self) -> None:
        for reward in self.rewards:
            reward.close()
        self.engine.shutdown()

    # The methods of the engine that a trainer calls, see `RolloutEngine`

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        await self.engine.init_weight_transfer_engine(init_info)

    async def start_weight_update(self) -> None:
        await self.engine.start_weight_update()

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        await self.engine.update_weights(update_info)

    async def finish_weight_update(self, weight_version: str) -> None:
        await self.engine.finish_weight_update(weight_version)

    async def loaded_checksums(self) -> list[int]:
        return await self.engine.loaded_checksums()

    async def unwritten_parameters(self) -> list[str]:
        return await self.engine.unwritten_parameters()

    async def layer_fingerprints(self, lengths: dict[str, int]) -> dict[str, WeightFingerprint]:
        return await self.engine.layer_fingerprints(lengths)

    async def peak_memory(self) -> Peaks:
        return await self.engine.peak_memory()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self, tags: list[str]) -> None:
        await self.engine.wake(tags)


def group_sizes(config: PPOConfig) -> dict[Purpose, int]:
    """Returns the number of samples of a prompt, by purpose."""
    return {"train": config.rollout.n_samples_per_prompt, "eval": config.eval.n_samples_per_prompt}


def engine_options(config: PPOConfig, on_gpu: bool, *, from_files: bool = False) -> EngineOptions:
    """Builds the engine's options. Without `from_files` the engine has random weights until the first weight
    sync."""
    return EngineOptions.of(
        config,
        engine=config.rollout.engine,
        model=config.actor.model_name_or_path,
        max_len=config.data.max_len,
        on_gpu=on_gpu,
        transfer_backend=transfer_backend(config, on_gpu),
        pipeline_parallel_size=config.vllm.pipeline_parallel_size,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enable_sleep=config.engines_sleep,
        load_weights=from_files,
        max_images=config.data.max_images_per_prompt,
        max_logprobs=max(
            MAX_LOGPROBS, config.rollout.max_kept_tokens, config.algo.advantage.score_centering_top_k
        ),
        lora=separate_adapters(config),
        returns_routing=config.algo.router_replay,
        keep_cache=config.vllm.keep_cache,
        timeout=config.rollout.engine_timeout,
        speculation=None if (text := config.vllm.speculative) is None else parse_speculation(text),
        float32_head=on_gpu,  # on CPUs vLLM converts the whole head at every step: 7 times slower
    )


def local_options(config: PPOConfig) -> EngineOptions:
    """Builds the options of an engine that loads the model's files in the trainer's process."""
    options = replace(engine_options(config, DEVICE_TYPE == "cuda", from_files=True), enable_sleep=True)
    if options.transfer_backend == "nccl":  # NCCL needs a GPU for each process
        return replace(options, transfer_backend="ipc")
    return options


def separate_adapters(config: PPOConfig) -> LoraConfig | None:
    """Returns the LoRA configuration, with the names of the adapted layers, if engines apply adapters
    separately; None if adapters are merged into the weights, or without LoRA."""
    lora = config.ds.lora
    if lora.rank == 0 or config.vllm.lora_sync == "merged":
        return None
    return replace(lora, target_modules=adapted_layers(config.actor.model_name_or_path, ACTOR_FLAG, lora))


def retries_on_other_engine(config: PPOConfig) -> bool:
    """Returns True if the last retry of an episode runs on another engine, because the first engine's node
    may be the cause of failures."""
    return config.rollout.retries > 0 and config.num_engines > 1


def transfer_backend(config: PPOConfig, on_gpu: bool) -> str:
    """Returns the transport of weight syncs: CUDA IPC if trainer and engines share GPUs, else a network
    transport. NCCL needs GPUs, Gloo is for CPUs, and Ray's object store works everywhere."""
    if config.vllm.sync_with_ray or config.rollout.engine != "vllm":
        return "ray"
    if not on_gpu:
        return "gloo"
    return (
        "ipc" if config.engines_colocated and config.vllm.sync_backend == "nccl" else config.vllm.sync_backend
    )
