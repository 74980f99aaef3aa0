"""Sampled tokens per second of episodes of several turns, on the same engine.

bare         vLLM's AsyncLLM with the requests of the episodes: each request is sent as soon as the one
             before it in its episode is answered
environment  an environment of MultiTurnAgentExecutor that answers after --latency milliseconds
openai       the same conversations by an agent with the `openai` client, over HTTP

All ways run in one process, one after the other, for each number of concurrent episodes. Then --calls single
calls measure the latency of the engine, of an episode's session without HTTP, of its server with a bare
client, and of its server with the `openai` client. Trust the ratios, not the absolute figures.

    python benchmarks/agents.py --episodes 64 256 1024 --latency 0 50 500
"""

import argparse
import asyncio
import copy
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.agents.openai import OpenAIAgentExecutor
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.backends.vllm.requests import vllm_params
from openrlhf.device import DEVICE_TYPE
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.types import Prompt, Trajectory

QUESTION = "Tom has 3 apples. He buys 4 apples. How many apples does Tom have?"
FEEDBACK = "Wrong. Try again."


def main() -> None:
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face name or folder (default: a tiny one, made here)")
    parser.add_argument(
        "--episodes", type=int, nargs="+", default=[64, 256], help="numbers of concurrent episodes"
    )
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[0, 50, 500], help="latencies of an environment step, ms"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=32, help="maximum length of an answer, tokens")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, whose median is printed")
    parser.add_argument("--calls", type=int, default=100, help="number of single calls, one at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine on a CPU")
    return parser.parse_args()


def environment(turns: int, latency: float) -> AgentExecutorBase:
    class Environment(AgentInstanceBase):
        def __init__(self) -> None:
            self.turn = 0

        async def step(self, states: dict, **kwargs: Any) -> dict:
            self.turn += 1
            if latency and self.turn < turns:
                await asyncio.sleep(latency)
            feedback = f"<|end|><|user|>{FEEDBACK}<|end|><|assistant|>"
            return {"rewards": 0.0, "environment_feedback": feedback, "done": self.turn == turns}

    return MultiTurnAgentExecutor(Environment)


def with_a_client(turns: int, latency: float) -> AgentExecutorBase:
    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt: str, label: Any, session: Any) -> float:
            messages = [{"role": "user", "content": QUESTION}]
            for turn in range(turns):
                if latency and turn:
                    await asyncio.sleep(latency)
                answer = await session.client.chat.completions.create(model=session.model, messages=messages)
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": FEEDBACK},
                ]
            return 0.0

    return AgentExecutor()


WAYS: dict[str, Callable[[int, float], AgentExecutorBase]] = {
    "environment": environment,
    "openai": with_a_client,
}
Request = tuple[list[int], Any]
"""Prompt and SamplingParams of a request."""


@dataclass
class Recorder:
    """Engine that remembers its requests by prompt."""

    engine: VLLMEngine
    asked: dict[tuple[int, ...], list[Request]] = field(default_factory=dict)

    async def generate(self, token_ids: list[int], params: Any, multi_modal_data: dict | None = None) -> Any:
        self.asked.setdefault(tuple(token_ids), []).append((token_ids, params))
        return await self.engine.generate(token_ids, params)

    def requests(self, t: Trajectory) -> list[Request]:
        """Returns the requests of an episode, one after the other."""
        return [self.asked[tuple(t.token_ids[:start].tolist())].pop() for start in t.turn_starts]


async def measure(options: argparse.Namespace, folder: Path) -> None:
    model = options.model or str(tiny_chat_model(folder / "model", max_len=1024))
    tokenizer, engine = load_tokenizer(model, flag="--model"), make_engine(model)
    await engine.start()
    stops = stop_token_ids(model, tokenizer)
    try:
        describe(options)
        for episodes in options.episodes:
            await of_many(options, engine, tokenizer, stops, episodes)
        await one_at_a_time(options, engine, tokenizer, stops)
    finally:
        engine.shutdown()


def make_engine(model: str) -> VLLMEngine:
    on_gpu = DEVICE_TYPE == "cuda"
    options = EngineOptions(
        model=model,
        dtype="bf16" if on_gpu else "fp32",
        max_len=1024,
        seed=0,
        transfer_backend="nccl" if on_gpu else "gloo",
        on_gpu=on_gpu,
        enable_prefix_caching=True,
    )
    os.environ.update(engine_environment(options))
    return VLLMEngine(options)


async def of_many(
    options: argparse.Namespace, engine: VLLMEngine, tokenizer: Any, stops: list[int], episodes: int
) -> None:
    """Measures `episodes` concurrent episodes in each way. A first round records the requests and warms the
    engine up."""
    print(f"\n{episodes} episodes in flight")
    for name, way in WAYS.items():
        recorder = Recorder(engine)
        first = runner(way(options.turns, 0), recorder, tokenizer, stops)
        trajectories = await play(first, episodes, options.max_new_tokens)
        requests = [recorder.requests(t) for t in trajectories]
        bare = [await seconds(replay(engine, requests)) for _ in range(options.rounds)]
        tokens = sum(t.num_actions for t in trajectories)
        tell(f"bare, asked as by {name}", tokens, bare, bare)
        for latency in options.latency:
            ours = runner(way(options.turns, latency / 1000), engine, tokenizer, stops)
            times = [
                await seconds(play(ours, episodes, options.max_new_tokens)) for _ in range(options.rounds)
            ]
            tell(f"{name}, {latency:g} ms", tokens, times, bare)


def runner(executor: AgentExecutorBase, engine: Any, tokenizer: Any, stops: list[int]) -> EpisodeRunner:
    return EpisodeRunner(engine, tokenizer, UserExecutor("agents.py", executor, AgentSetting()), stops)


async def play(of: EpisodeRunner, episodes: int, max_new_tokens: int) -> list[Trajectory]:
    sampling = Sampling(
        purpose="train",
        num_samples=episodes,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=max_new_tokens,
        max_len=1024,
        stop=(),
        run_seed=0,
    )
    text = of.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    group = await of.run_group(Prompt(prompt_id=0, text=str(text)), sampling)
    failed = [t.error for t in group.trajectories if not t.ok]
    assert not failed, failed[0]
    return group.trajectories


async def replay(engine: VLLMEngine, requests: Sequence[Sequence[Request]]) -> None:
    async def one(of_episode: Sequence[Request]) -> None:
        for token_ids, params in of_episode:
            prompt: Any = {"prompt_token_ids": token_ids}
            asked = vllm_params(params)
            async for _ in engine.llm.generate(prompt, asked, request_id=uuid.uuid4().hex):
                pass

    await asyncio.gather(*map(one, requests))


async def one_at_a_time(
    options: argparse.Namespace, engine: VLLMEngine, tokenizer: Any, stops: list[int]
) -> None:
    """Measures the overhead of a call beside the engine's own work."""
    times: dict[str, list[float]] = {"engine": [], "session": [], "bare client": [], "openai": []}

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt: str, label: Any, session: Any) -> float:
            messages = [{"role": "user", "content": QUESTION}]
            prompt_ids = session.build_prompt(messages)
            params = copy.copy(session.sampling_params)  # they ask for one token
            body = {"model": session.model, "messages": messages, "max_tokens": 1}
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with aiohttp.ClientSession(headers=headers) as bare:
                for _ in range(options.calls):
                    ways = {
                        "engine": session.engine.generate(prompt_ids, params),
                        "session": session.complete(body),
                        "bare client": post(bare, f"{session.base_url}/chat/completions", body),
                        "openai": session.client.chat.completions.create(**body),
                    }
                    for name, call in ways.items():
                        times[name].append(await seconds(call))
            return 0.0

    await play(runner(AgentExecutor(), engine, tokenizer, stops), 1, 1)
    medians = [f"{name} {statistics.median(taken) * 1000:.2f} ms" for name, taken in times.items()]
    print(f"\none call of one token, median of {options.calls}: {', '.join(medians)}")


async def post(client: aiohttp.ClientSession, url: str, body: dict) -> None:
    async with client.post(url, json=body) as response:
        await response.json()


async def seconds(work: Awaitable) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def describe(options: argparse.Namespace) -> None:
    import vllm

    load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else "?"
    print(
        f"{options.model or 'tiny'}, {options.turns} turns of at most {options.max_new_tokens} tokens, "
        f"{options.threads} threads, vllm {vllm.__version__}, load {load}",
        flush=True,
    )


def tell(name: str, tokens: int, times: Sequence[float], bare: Sequence[float]) -> None:
    ratios = [theirs / mine for theirs, mine in zip(bare, times, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
    print(f"{name:32}{tokens / statistics.median(times):9.0f} tokens/s   of bare {spread}", flush=True)


if __name__ == "__main__":
    main()
