"""From a prompt to trajectories, inside an engine's process. The border at which a failed episode becomes
data."""

import asyncio
from dataclasses import dataclass

import numpy as np

from openrlhf.config.ppo import PPOConfig
from openrlhf.rollout.seeds import seed_at
from openrlhf.types import Group, Outcome, Prompt, Trajectory, runs
from openrlhf.utils.agent import AgentExecutorBase, RewardError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample, in training or in evaluation."""

    purpose: str
    """Part of every seed's address: train or eval."""
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    """None: as many as fit."""
    max_len: int
    stop: tuple[str, ...]
    run_seed: int

    @classmethod
    def for_training(cls, config: PPOConfig) -> "Sampling":
        rollout = config.rollout
        return cls._of(config, "train", rollout.n_samples_per_prompt, rollout.temperature)

    @classmethod
    def for_evaluation(cls, config: PPOConfig) -> "Sampling":
        return cls._of(config, "eval", config.eval.n_samples_per_prompt, config.eval.temperature)

    @classmethod
    def _of(cls, config: PPOConfig, purpose: str, num_samples: int, temperature: float) -> "Sampling":
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


NO_EPISODE = {
    "observation_tokens": [],
    "action_ranges": [],
    "rollout_log_probs": [],
    "weight_versions": [],
    "finish_reason": "abort",
    "truncated": False,
}
"""What is known of an episode whose executor failed without telling."""


class EpisodeRunner:
    def __init__(self, engine, tokenizer, executor: AgentExecutorBase, stop_token_ids: list[int]) -> None:
        self.engine, self.tokenizer, self.executor = engine, tokenizer, executor
        self.stop_token_ids = stop_token_ids

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """All samples of one prompt, concurrently, in order."""
        samples = [self.run(prompt, i, sampling) for i in range(sampling.num_samples)]
        return Group(prompt=prompt, trajectories=await asyncio.gather(*samples))

    async def run(self, prompt: Prompt, sample_index: int, sampling: Sampling) -> Trajectory:
        seed = seed_at(sampling.run_seed, sampling.purpose, prompt.episode, prompt.prompt_id, sample_index)
        try:
            episode = await self.executor.execute(
                prompt.text,
                prompt.label,
                self._sampling_params(sampling, seed),
                sampling.max_len,
                self.tokenizer,
                self.engine,
            )
        except RewardError as error:
            episode = error.episode or NO_EPISODE
            return _trajectory(prompt, sample_index, seed, episode, Outcome.REWARD_ERROR, str(error))
        outcome = Outcome.ABORTED if episode["finish_reason"] == "abort" else Outcome.OK
        return _trajectory(prompt, sample_index, seed, episode, outcome)

    def _sampling_params(self, sampling: Sampling, seed: int):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            logprobs=0,  # that of the sampled token alone
            detokenize=bool(sampling.stop),  # only to find them: token ids stay what they are
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _trajectory(
    prompt: Prompt, sample_index: int, seed: int, episode: dict, outcome: Outcome, error: str = ""
) -> Trajectory:
    token_ids = np.array(episode["observation_tokens"], np.int32)
    action_mask = np.zeros(len(token_ids), np.bool_)
    for start, end in episode["action_ranges"]:
        action_mask[start:end] = True
    ok = outcome is Outcome.OK
    return Trajectory(
        prompt=prompt,
        sample_index=sample_index,
        token_ids=token_ids,
        action_mask=action_mask,
        rollout_log_probs=np.array(episode["rollout_log_probs"], np.float32)[action_mask],
        weight_versions=runs(episode["weight_versions"]),
        reward=episode["reward"] if ok else None,
        score=episode["scores"] if ok else None,
        outcome=outcome,
        error=error,
        finish_reason=episode["finish_reason"],
        truncated=episode["truncated"],
        seed=seed,
        extra_logs=episode.get("extra_logs", {}),
    )
