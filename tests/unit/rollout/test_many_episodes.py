"""Many concurrent episodes, most of which fail in some way, are counted exactly and leave nothing behind."""

import asyncio
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import Engine

from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory

pytestmark = pytest.mark.processes
TOKENIZER = tiny_tokenizer()
ANSWER = TOKENIZER("7<|end|>", add_special_tokens=False)["input_ids"]
KINDS = {
    "fine": Outcome.OK,
    "raises": Outcome.ENV_ERROR,
    "raises in a thread": Outcome.ENV_ERROR,
    "nonsense": Outcome.ENV_ERROR,
    "hangs": Outcome.TIMED_OUT,
    "takes too many steps": Outcome.TIMED_OUT,
    "no reward": Outcome.REWARD_ERROR,
    "says too much": Outcome.OK,
    "engine gives up": Outcome.ABORTED,
}
EACH = 8
TURNS = 3
MEGABYTES = 2 * 2**20
"""Bytes of text that one environment answers with."""
STEP_TIMEOUT, EPISODE_TIMEOUT = 3.0, 4.0

ENVIRONMENT = f"""
import asyncio
import weakref
from openrlhf.agents.base import AgentInstanceBase, MultiTurnAgentExecutor, RewardError

ALIVE = weakref.WeakSet()

class Environment(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        ALIVE.add(self)
        self.kind, self.turn = states["label"], 0
        return states

    async def step(self, states, **kwargs):
        self.turn += 1
        if self.kind == "raises":
            raise ConnectionError("gone")
        if self.kind == "raises in a thread":
            await asyncio.to_thread(dict().__getitem__, "gone")
        if self.kind == "nonsense":
            return "nonsense"
        if self.kind == "hangs":
            await asyncio.Event().wait()
        if self.kind == "takes too many steps":
            await asyncio.sleep({STEP_TIMEOUT} / 2)
            return {{"rewards": 0, "environment_feedback": " ", "done": False}}
        if self.kind == "no reward":
            raise RewardError("the judge is out")
        feedback = "x" * {MEGABYTES} if self.kind == "says too much" else " More:"
        return {{"rewards": 1, "environment_feedback": feedback, "done": self.turn == {TURNS}}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Environment)
"""
WITH_A_CLIENT = f"""
import asyncio
import weakref
from openrlhf.agents.base import RewardError
from openrlhf.agents.openai import OpenAIAgentExecutor

ALIVE = weakref.WeakSet()

class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, kind, session):
        ALIVE.add(session)
        messages = [{{"role": "user", "content": prompt}}]
        for turn in range({TURNS}):
            if turn and kind == "raises":
                raise ConnectionError("gone")
            if turn and kind == "raises in a thread":
                await asyncio.to_thread(dict().__getitem__, "gone")
            if kind == "hangs":
                await asyncio.Event().wait()
            while kind == "takes too many steps":
                await asyncio.sleep(0.3)
            if turn and kind == "no reward":
                raise RewardError("the judge is out")
            if turn and kind == "says too much":
                messages[-1]["content"] = "x" * {MEGABYTES}
            answer = await session.client.chat.completions.create(model=session.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(), {{"role": "user", "content": "More:"}}]
        return {{}} if kind == "nonsense" else float(turn + 1)
"""


class SlowEngine(Engine):
    """Engine that answers after a while, and aborts requests that ask for it."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        await asyncio.sleep(self.random.random() * 0.02)
        output = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        if TOKENIZER.decode(prompt_token_ids).find("gives up") >= 0:
            output.outputs[0].finish_reason = "abort"
        self.asked.clear()
        return output

    random = random.Random(0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def play(runner: EpisodeRunner, kinds: Iterable[str]) -> list[Trajectory]:
    sampling = Sampling.for_training(PPOConfig(rollout=RolloutConfig(max_new_tokens=8)))
    sampling = replace(sampling, max_len=200, num_samples=EACH)
    prompts = [Prompt(prompt_id=i, text=f"{kind} ", label=kind) for i, kind in enumerate(kinds)]
    groups = await asyncio.gather(*(runner.run_group(prompt, sampling) for prompt in prompts))
    await asyncio.sleep(0.2)  # the other side closes connections a moment later
    gc.collect()
    return [t for group in groups for t in group.trajectories]


@pytest.mark.parametrize("source", [ENVIRONMENT, WITH_A_CLIENT], ids=["environment", "openai"])
def test_every_failure_is_counted_and_none_is_left(tmp_path: Path, source: str) -> None:
    (path := tmp_path / "agent.py").write_text(source)

    async def rounds() -> list[Trajectory]:
        setting = AgentSetting(tokenizer=TOKENIZER, step_timeout=STEP_TIMEOUT)
        executor = await UserExecutor.load(str(path), setting)
        runner = EpisodeRunner(
            SlowEngine(ANSWER), TOKENIZER, executor, [2], timeout=EPISODE_TIMEOUT, max_concurrent=64
        )
        await play(runner, ["fine"])
        tasks, files = len(asyncio.all_tasks()), open_files()
        found = await play(runner, KINDS)
        assert (len(asyncio.all_tasks()), open_files()) == (tasks, files)
        alive = sys.modules[type(executor.executor).__module__].ALIVE
        assert not len(alive), list(alive)
        return found

    found = asyncio.run(rounds())
    counts = Counter((t.prompt.label, t.outcome) for t in found)
    assert counts == dict.fromkeys(expected(source).items(), EACH), counts
    fine = [t for t in found if t.prompt.label == "fine"]
    assert [t.reward for t in fine] == [TURNS] * EACH
    assert [(len(t.turn_starts), t.num_actions) for t in fine] == [(TURNS, TURNS * len(ANSWER))] * EACH
    assert all(t.error for t in found if t.outcome not in (Outcome.OK, Outcome.ABORTED))


def expected(source: str) -> dict[str, Outcome]:
    """Returns the expected outcome. A client is told that its prompt is too long, and does not look at what
    an answer ended with."""
    if source is ENVIRONMENT:
        return KINDS
    return KINDS | {"says too much": Outcome.ENV_ERROR}
