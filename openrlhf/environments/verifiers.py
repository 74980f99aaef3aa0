"""Environments of the package verifiers: its tasks and rewards, with the policy as the model of its
agents."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from openrlhf.api import ErrorCode, OpenAIAgentExecutor, RunError, Session, UsageError
from openrlhf.environments.packages import package

package("verifiers")

import aiohttp  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.dialects.chat import message_to_wire  # noqa: E402

CHAT = {"harness": {"id": "openrlhf_chat"}, "runtime": {"type": "subprocess"}}
"""Configuration of an agent that holds a conversation without tools, in this process."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Requests the next answer. A conversation ends if no room is left for it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or [])
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            ) as response,
        ):
            text = await response.text()
        if not response.ok and "context_length_exceeded" not in text:
            raise RunError(ErrorCode.EPISODES_FAILED, f"the policy answers {response.status}: {text}")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatHarness"]  # verifiers finds harnesses by __all__
sys.modules["openrlhf_chat"] = sys.modules[__name__]  # verifiers imports harnesses as top-level modules only


class VerifiersExecutor(OpenAIAgentExecutor):
    """Runs one task per episode; labels are task numbers, see `rows`. The reward is the mean over the
    trainable agents; their metrics and the parts of their rewards become metrics of the run."""

    def __init__(self, config: Mapping[str, Any], tool_parser: str | None = None) -> None:
        """`config`: an `[env]` block of verifiers, such as {"taskset": {"id": "gsm8k-v1"}, "agent": CHAT}.
        `tool_parser`: see OpenAIAgentExecutor."""
        super().__init__(tool_parser)
        self.config = vf.resolve_env_config(dict(config))
        self._coming = iter(vf.load_taskset(self.config.taskset))
        self._tasks: list[vf.Task] = []
        self._playing = 0

    def rows(self, count: int) -> Iterator[dict[str, Any]]:
        """Yields the first `count` rows for --data.prompt_dataset: the task's prompt as `input`, its number
        as `label`."""
        for task in islice(vf.load_taskset(self.config.taskset), count):
            yield {"input": task.data.prompt_text or f"task {task.data.idx}", "label": task.data.idx}

    async def run_agent(self, prompt: str, label: Any, session: Session) -> dict:
        context = vf.ModelContext(
            model=session.model,
            client=vf.EvalClientConfig(base_url=session.base_url, api_key_var=""),
            sampling=vf.Sampling(session_key=session.api_key),
        )
        async with self._environment() as environment:
            episode = await environment.run_episode(self._task(int(label)), context)
        if errors := [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]:
            raise RunError(ErrorCode.EPISODES_FAILED, f"{errors[-1].type}: {errors[-1].message}")
        if fixed := [t.agent.name for t in episode.traces if not t.agent.trainable and _asks(t, session)]:
            text = "not trainable, but it queries the policy; give it a model and a client"
            raise UsageError(ErrorCode.USER_CODE, text, value=", ".join(fixed))
        return convert_result([trace for trace in episode.traces if trace.agent.trainable])

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[vf.Env]:
        """Yields the environment with its servers running; concurrent episodes share them."""
        if self._playing == 0:
            self._over, self._served = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._serve(self._served, self._over))
        self._playing += 1
        try:
            yield await asyncio.shield(self._served)
        finally:
            self._playing -= 1
            if self._playing == 0:
                self._over.set()

    async def _serve(self, served: asyncio.Future[vf.Env], over: asyncio.Event) -> None:
        try:
            environment = vf.load_environment(self.config)
            async with environment.serving():
                served.set_result(environment)
                await over.wait()  # bounded: an idle server
        except Exception as error:
            if served.done():
                raise
            served.set_exception(error)

    def _task(self, number: int) -> vf.Task:
        self._tasks += islice(self._coming, max(0, number + 1 - len(self._tasks)))
        if not 0 <= number < len(self._tasks):
            text = f"{self.config.taskset.id} has {len(self._tasks)} tasks, and no task {number}"
            raise UsageError(ErrorCode.INVALID_ROW, text, flag="--data.label_key")
        return self._tasks[number]


def _asks(trace: vf.Trace, session: Session) -> bool:
    client = trace.agent.config.client
    return client is not None and client.base_url == session.base_url


def convert_result(traces: list[vf.Trace]) -> dict:
    logs: dict[str, float] = {}
    for trace in traces:
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        logs |= parts | {name: value for name, value in trace.metrics.items() if value is not None}
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "truncated": any(t.is_truncated or any(call.error for call in t.calls[-1:]) for t in traces),
        "extra_logs": logs,
    }
