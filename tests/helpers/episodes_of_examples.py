"""Episodes of an agent's file, on a stand-in for the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_engine import Engine

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Prompt, Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
TOKENIZER = tiny_tokenizer()
END = "<|end|>"

Answer = str | Callable[[str], str]
"""Answer of the policy: a text, or a function of the whole stream before it."""


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def play(
    executor: Path | AgentExecutorBase,
    prompt: str,
    label: Any,
    *answers: Answer,
    samples: int = 1,
    max_len: int = 2000,
    max_turns: int | None = None,
    step_timeout: float | None = None,
    max_new_tokens: int = 60,
) -> list[Trajectory]:
    """Plays all samples of one prompt."""
    setting = AgentSetting(max_turns=max_turns, step_timeout=step_timeout)
    rollout = RolloutConfig(n_samples_per_prompt=samples, max_new_tokens=max_new_tokens)
    engine = Engine(*map(as_tokens, answers))

    async def run() -> list[Trajectory]:
        if isinstance(executor, Path):
            user = await UserExecutor.load(str(executor), setting)
        else:
            user = UserExecutor("agent.py", executor, setting)
        sampling = replace(Sampling.for_training(PPOConfig(rollout=rollout)), max_len=max_len)
        group = await EpisodeRunner(engine, TOKENIZER, user, [2]).run_group(
            Prompt(prompt_id=0, text=prompt, label=label), sampling
        )
        return group.trajectories

    return asyncio.run(run())


def as_tokens(answer: Answer) -> Any:
    if callable(answer):
        return lambda token_ids: tokens(answer(TOKENIZER.decode(token_ids)) + END)
    return tokens(answer + END)


def turns(t: Trajectory) -> list[tuple[str, bool]]:
    """Returns the stream as texts, and whether each is trained on."""
    found: list[tuple[list[int], bool]] = []
    for token, mine in zip(t.token_ids.tolist(), t.action_mask.tolist(), strict=True):
        if not found or found[-1][1] != mine:
            found.append(([], mine))
        found[-1][0].append(token)
    return [(str(TOKENIZER.decode(part)), mine) for part, mine in found]


def told(text: str) -> str:
    return f"<|user|>{text}{END}<|assistant|>"
