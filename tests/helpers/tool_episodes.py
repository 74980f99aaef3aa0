"""Episodes with tools, on a stand-in for the engine; vLLM's own parser finds the calls."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_engine import Engine

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.tools import ToolAgentExecutor
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory

TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def run_episode(
    executor: AgentExecutorBase,
    *answers: str,
    prompt: str = "?",
    label: str = "2",
    max_len: int = 600,
    finish_reason: str = "stop",
    max_turns: int | None = None,
    step_timeout: float | None = None,
) -> tuple[Trajectory, Engine]:
    """Runs an episode and returns its one sequence."""
    engine = Engine(*map(tokens, answers), finish_reason=finish_reason)
    rollout = RolloutConfig(n_samples_per_prompt=1, max_new_tokens=None)
    sampling = replace(Sampling.for_training(PPOConfig(rollout=rollout)), max_len=max_len)
    setting = AgentSetting(max_turns=max_turns, step_timeout=step_timeout)

    async def run() -> list[Trajectory]:
        runner = EpisodeRunner(engine, TOKENIZER, UserExecutor("agent.py", executor, setting), [2])
        return (await runner.run_group(Prompt(prompt_id=0, text=prompt, label=label), sampling)).trajectories

    (trajectory,) = asyncio.run(run())
    return trajectory, engine


def play(
    *answers: str,
    tools: Any,
    reward: Callable[..., Any] = lambda prompt, label, messages: float(label in messages[-1]["content"]),
    mistakes: Any = (),
    max_result_length: int = 8000,
    **options: Any,
) -> tuple[Trajectory, Engine]:
    class AgentExecutor(ToolAgentExecutor):
        def __init__(self) -> None:
            super().__init__(tools, mistakes=mistakes, max_result_length=max_result_length)

        def reward(self, prompt, label, messages):  # need not be async
            return reward(prompt, label, messages)

    return run_episode(AgentExecutor(), *answers, **options)


def said(*answers: str, **options: Any) -> list[str]:
    """Returns the answers of the tools in an episode."""
    found: list[str] = []

    def reward(prompt, label, messages):
        found.extend(m["content"] for m in messages[1:] if m["role"] != "assistant")
        return 0

    t, _ = play(*answers, reward=reward, **options)
    assert t.outcome is Outcome.OK, t.error
    return found
