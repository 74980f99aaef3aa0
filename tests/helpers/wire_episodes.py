"""Episodes whose agent reaches the policy by a real client, over HTTP, and a proof for their tokens."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
from engine_contract import options_of
from fake_engine import Engine
from tool_episodes import TOKENIZER, tokens
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager

from openrlhf.agents.openai import OpenAIAgentExecutor, Session
from openrlhf.backends.rollout import engine_class
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.types import Outcome, Prompt, Trajectory

Agent = Callable[[Session], Awaitable[Any]]


@ToolParserManager.register_module("shopper")
class Shopper(ToolParser):
    """Reads every answer as a call of the tool `price`: an untrained policy writes no calls."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        arguments = json.dumps({"fruit": model_output}, ensure_ascii=False)
        call = ToolCall(function=FunctionCall(name="price", arguments=arguments))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=None)


class Heard:
    """Passes requests on, and keeps the prompt and the answers of each."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.turns: list[tuple[list[int], list[int]]] = []

    async def generate(self, prompt_token_ids: list[int], *arguments: Any) -> Any:
        found = await self.engine.generate(prompt_token_ids, *arguments)
        self.turns += [(list(prompt_token_ids), list(answer.token_ids)) for answer in found.outputs]
        return found


class Executor(OpenAIAgentExecutor):
    def __init__(self, agent: Agent, tool_parser: str | None) -> None:
        super().__init__(tool_parser)
        self.agent = agent

    async def run_agent(self, prompt: str, label: Any, session: Session) -> Any:
        found = await self.agent(session)
        return 1.0 if found is None else found


async def _played(
    engine: Any, agent: Agent, parser: str | None, samples: int, max_len: int
) -> tuple[list[Trajectory], Heard]:
    heard = Heard(engine)
    rollout = RolloutConfig(n_samples_per_prompt=samples, max_new_tokens=12)
    sampling = replace(Sampling.for_training(PPOConfig(rollout=rollout)), max_len=max_len)
    user = UserExecutor("agent.py", Executor(agent, parser), AgentSetting())
    runner = EpisodeRunner(heard, TOKENIZER, user, [TOKENIZER.eos_token_id])
    group = await runner.run_group(Prompt(prompt_id=0, text="?", label=""), sampling)
    for t in group.trajectories:
        assert t.outcome is Outcome.OK, t.error
    return group.trajectories, heard


def play_by_hand(
    agent: Agent, *answers: str, parser: str | None = None, samples: int = 1, max_len: int = 600
) -> tuple[list[Trajectory], Heard]:
    """Plays an agent with these answers of the policy."""
    engine = Engine(*map(tokens, answers))
    return asyncio.run(_played(engine, agent, parser, samples, max_len))


def play_sampled(
    name: str, model: Path, agent: Agent, *, parser: str | None = None, samples: int = 1, max_len: int = 512
) -> list[Trajectory]:
    """Plays an agent with the answers that the engine `name` samples, and checks the tokens."""

    async def run() -> tuple[list[Trajectory], Heard]:
        options = replace(options_of(name, model), max_len=max_len)
        engine = engine_class(options)(options)
        await engine.start()
        try:
            return await _played(engine, agent, parser, samples, max_len)
        finally:
            engine.shutdown()

    found, heard = asyncio.run(run())
    check_tokens(found, heard)
    return found


def check_tokens(found: Sequence[Trajectory], heard: Heard) -> None:
    """Checks that the tokens trained on are those sampled, each once, after exactly the tokens that the
    policy had read."""
    left = list(heard.turns)
    for t in found:
        ids, covered = t.token_ids.tolist(), 0
        for start in t.turn_starts.tolist():
            turn = next(turn for turn in left if turn[0] == ids[:start] and _follows(ids, turn))
            left.remove(turn)
            end = start + len(turn[1])
            assert t.action_mask[start:end].all()
            covered += len(turn[1])
        assert covered == t.action_mask.sum()
    assert not [turn for turn in left if turn[1]]
    assert sum(int(t.action_mask.sum()) for t in found) == sum(len(answer) for _, answer in heard.turns)


def _follows(ids: list[int], turn: tuple[list[int], list[int]]) -> bool:
    start = len(turn[0])
    return ids[start : start + len(turn[1])] == turn[1]


@asynccontextmanager
async def anthropic_client(session: Session):
    url = session.environment["ANTHROPIC_BASE_URL"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key, max_retries=0) as client:
        yield client
