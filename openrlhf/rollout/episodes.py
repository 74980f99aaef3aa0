"""Runs the episodes of a prompt in an engine's process, and converts failures to outcomes."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from openrlhf.agents.base import AgentExecutorBase, Engine, RewardError, StepTimeout
from openrlhf.completions import SamplingParams
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.pictures import decoded
from openrlhf.errors import without_secrets
from openrlhf.rollout.executors import EnvironmentFailed, UserExecutor
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.rollout.results import read_result
from openrlhf.rollout.seeds import seed_at
from openrlhf.rollout.trajectories import trajectories
from openrlhf.types import Episode, Outcome, Prompt, PromptGroup, Purpose, Work, count_work, no_work
from openrlhf.user_file import headline

if TYPE_CHECKING:  # imports that take seconds
    from PIL.Image import Image as Picture
    from transformers import PreTrainedTokenizerBase


CLOSE_SECONDS = 10.0
"""Seconds that an episode which took too long has to close its environment."""


class EpisodeTimeout(Exception):
    """Raised for an episode that takes longer than --rollout.episode_timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of training or evaluation."""

    purpose: Purpose
    """Purpose of the samples, which is part of the address of every seed."""
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    """Maximum tokens of one answer. None: limited by `max_len` only."""
    max_len: int
    stop: tuple[str, ...]
    run_seed: int
    max_kept_tokens: int = 0
    """Maximum number of recorded tokens of a top-p/top-k nucleus; see RecordingEngine."""
    num_likely: int = 0
    """Number of recorded most likely tokens of each action."""

    @classmethod
    def for_training(cls, config: PPOConfig) -> "Sampling":
        rollout = config.rollout
        sampling = cls._of(config, "train", rollout.n_samples_per_prompt, rollout.temperature)
        likely = config.algo.advantage.score_centering_top_k
        return replace(sampling, max_kept_tokens=rollout.max_kept_tokens, num_likely=likely)

    @classmethod
    def for_evaluation(cls, config: PPOConfig) -> "Sampling":
        sampling = cls._of(config, "eval", config.eval.n_samples_per_prompt, config.eval.temperature)
        top_p, most = config.eval.top_p or sampling.top_p, config.eval.max_new_tokens
        return replace(sampling, top_p=top_p, max_new_tokens=most or sampling.max_new_tokens)

    @classmethod
    def _of(cls, config: PPOConfig, purpose: Purpose, num_samples: int, temperature: float) -> "Sampling":
        return cls(
            purpose=purpose,
            num_samples=num_samples,
            temperature=temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_new_tokens=config.rollout.max_new_tokens,
            max_len=config.data.max_len,
            stop=config.rollout.stop or (),
            run_seed=config.train.seed,
        )


class EpisodeRunner:
    """Runs an executor and converts its result or failure to an Episode. A run ends only if the engine dies
    or one of the package's own executors raises an error."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        executor: AgentExecutorBase,
        stop_token_ids: list[int],
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Collection[str] = (),
        max_concurrent: int | None = None,
        reward_is_optional: bool = False,
        image_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`timeout`: seconds for one episode. `retries`: maximum reruns of an episode whose outcome is in
        `retry_on`. `max_concurrent`: episodes that run at the same time, None: all. `reward_is_optional`:
        accept None as a reward, because other rewards are added. `image_token_ids`: see RecordingEngine."""
        self.engine, self.tokenizer = engine, tokenizer
        self.stop_token_ids, self.timeout = stop_token_ids, timeout
        self.retries, self.retry_on = retries, retry_on
        self.reward_is_optional, self.image_token_ids = reward_is_optional, image_token_ids
        self._slots = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self.done: Work = no_work()
        """Work finished since the start, over all groups."""
        self.use(executor)

    def use(self, executor: AgentExecutorBase) -> None:
        self.executor, self.is_users = executor, isinstance(executor, UserExecutor)
        self.source = executor.source if isinstance(executor, UserExecutor) else type(executor).__name__

    def with_executor(self, executor: AgentExecutorBase) -> Self:
        """Returns a runner of another executor that shares the limits and the count of finished work."""
        other = copy(self)
        other.use(executor)
        return other

    async def run_group(
        self, prompt: Prompt, sampling: Sampling, samples: Sequence[int] | None = None
    ) -> PromptGroup:
        """Runs all samples of one prompt concurrently and returns them in order. `samples`: run only samples
        with these indices, which failed on another engine, once."""
        pictures = [decoded(image.data) for image in prompt.images]
        if samples is None:
            running = [self.run(prompt, i, sampling, pictures) for i in range(sampling.num_samples)]
        else:
            last = self.retries + 1
            running = [self._attempt(prompt, i, sampling, pictures, last) for i in samples]
        episodes = await asyncio.gather(*(self._count_finished(each, prompt, sampling) for each in running))
        return PromptGroup(
            prompt=prompt, trajectories=[t for episode in episodes for t in trajectories(episode)]
        )

    async def _count_finished(
        self, running: Coroutine[Any, Any, Episode], prompt: Prompt, sampling: Sampling
    ) -> Episode:
        episode = await running
        self.done += count_work(prompt, sampling.purpose, 1)
        return episode

    async def run(
        self, prompt: Prompt, sample_index: int, sampling: Sampling, pictures: "Sequence[Picture]" = ()
    ) -> Episode:
        """Runs one sample, with retries. `pictures`: the prompt's decoded images."""
        episode = await self._attempt(prompt, sample_index, sampling, pictures, 0)
        for attempt in range(1, self.retries + 1):
            if episode.outcome in self.retry_on:
                episode = await self._attempt(prompt, sample_index, sampling, pictures, attempt)
        return episode

    async def _attempt(
        self,
        prompt: Prompt,
        sample_index: int,
        sampling: Sampling,
        pictures: "Sequence[Picture]",
        attempt: int,
    ) -> Episode:
        address: tuple[int | str, ...] = (
            *(sampling.run_seed, sampling.purpose, prompt.epoch, prompt.prompt_id, sample_index),
            *(("attempt", attempt) if attempt else ()),
        )
        own = [picture.copy() for picture in pictures]  # an executor may modify them
        known = list(zip(prompt.images, own, strict=True))
        engine = RecordingEngine(
            self.engine,
            address,
            self._sampling_params(sampling),
            known,
            self.image_token_ids,
            sampling.max_kept_tokens,
            sampling.num_likely,
        )
        seed = seed_at(*address)
        begun = Episode(prompt=prompt, sample_index=sample_index, seed=seed, turns=[], reward=None)
        async with self._slots:
            return await self._finish(begun, sampling, engine, own)

    async def _finish(
        self, episode: Episode, sampling: Sampling, engine: RecordingEngine, pictures: "list[Picture]"
    ) -> Episode:
        """Runs the executor. Returns the episode with its turns and its result or failure."""

        def failed(outcome: Outcome, error: str = "") -> Episode:
            return replace(episode, turns=[*engine.turns], outcome=outcome, error=without_secrets(error))

        try:
            result = await self._execute(episode.prompt, sampling, engine, pictures)
            if engine.turns and engine.turns[-1].finish_reason == "abort":
                return failed(Outcome.ABORTED)
            if not all(np.isfinite(turn.log_probs).all() for turn in engine.turns):
                error = "the engine sampled with log-probs that are not finite: are its weights?"
                return failed(Outcome.ENV_ERROR, error)
            of_runner = {"source": self.source, "reward_is_optional": self.reward_is_optional}
            try:
                return read_result(replace(episode, turns=engine.turns), result, **of_runner)
            except (RewardError, EnvironmentFailed):
                raise
            except Exception as error:  # of users' values: unequal lists of tokens, a generator that raises
                text = f"{self.source} returned what cannot be read: {headline(error)}"
                return failed(Outcome.ENV_ERROR, text)
        except RewardError as error:
            return failed(Outcome.REWARD_ERROR, str(error))
        except EnvironmentFailed as error:
            return failed(Outcome.ENV_ERROR, str(error))
        except StepTimeout as error:
            return failed(Outcome.TIMED_OUT, f"{self.source}: {error}")
        except EpisodeTimeout as error:
            return failed(Outcome.TIMED_OUT, f"{self.source} {error}")
        finally:
            engine.check_alive()

    async def _execute(
        self, prompt: Prompt, sampling: Sampling, engine: RecordingEngine, pictures: "list[Picture]"
    ) -> Any:
        """Returns the executor's result. Cancels it after `timeout`, and raises EpisodeTimeout once it has
        ended, at the latest after CLOSE_SECONDS."""
        episode = self.executor.execute(
            prompt.text,
            deepcopy(prompt.label),  # an environment may modify it
            self._sampling_params(sampling),
            sampling.max_len,
            self.tokenizer,
            engine,
            **({"images": pictures} if pictures else {}),
        )
        task = asyncio.create_task(episode)
        try:
            await asyncio.wait([task], timeout=self.timeout)
            if task.done():
                return task.result()  # bounded: it is done
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_SECONDS)
        finally:
            task.cancel()
        late = "" if task.done() else f"; once cancelled, it did not end in {CLOSE_SECONDS:g} s"
        raise EpisodeTimeout(f"took longer than --rollout.episode_timeout {self.timeout:g} s{late}")

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(self.stop_token_ids),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            logprobs=0,  # of the sampled token only
            detokenize=self.is_users or bool(sampling.stop),  # recorded token ids do not depend on it
            skip_special_tokens=False,
        )
