"""Environments of NVIDIA NeMo Gym: its agent servers run the episodes, and their model server queries the
policy."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from openrlhf.api import ErrorCode, OpenAIAgentExecutor, RunError, Session, UsageError

SESSION = "openrlhf_session"
"""Field of a request's body with the address and key of the episode's server."""
OF_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields that NeMo Gym adds to the messages that it sends back; they are dropped, since the engine has
recorded them."""


class NeMoGymExecutor(OpenAIAgentExecutor):
    """Posts each label, a row of NeMo Gym (see `rows`), to `/run` of the agent that its `agent_ref` names;
    the response has the reward.

    All episodes of a machine share one model server of NeMo Gym, whose `base_url` must be
    `http://127.0.0.1:{port}/v1`. It forwards `responses_create_params.metadata.extra_body`, which routes a
    request to its episode in whichever engine process runs it."""

    def __init__(self, agents: Mapping[str, str], port: int, tool_parser: str | None = None) -> None:
        """`agents`: addresses by name, such as {"simple_agent": "http://127.0.0.1:8001"}. `port`: the local
        port that the model server sends requests to. `tool_parser`: see OpenAIAgentExecutor."""
        super().__init__(tool_parser)
        self.agents, self.port = agents, port
        self._door: asyncio.Task[None] | None = None

    async def run_agent(self, prompt: str, label: Any, session: Session) -> dict:
        self._door = self._door or asyncio.create_task(open_door(self.port))
        await asyncio.shield(self._door)
        row = json.loads(label) if isinstance(label, str) else label
        address = f"{self._address(row)}/run"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(address, json=addressed(row, session)) as response,
        ):
            if not response.ok:
                text = (await response.text())[:500]
                problem = f"the agent server answers {response.status}: {text}"
                raise RunError(ErrorCode.EPISODES_FAILED, problem, value=address)
            return convert_result(await response.json())

    def _address(self, row: Mapping[str, Any]) -> str:
        name = (row.get("agent_ref") or {}).get("name")
        if name not in self.agents:
            text = f"agent_ref names {name!r}, whose address is not known; known: {', '.join(self.agents)}"
            raise UsageError(ErrorCode.INVALID_ROW, text)
        return self.agents[name].rstrip("/")


def rows(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yields rows for --data.prompt_dataset from the JSON lines of a NeMo Gym dataset. `input` is shown in
    reports only; the policy reads the agent's requests. Raises UsageError for a line of another format."""
    for number, line in enumerate(lines, start=1):
        try:
            asked = json.loads(line)["responses_create_params"]["input"]
        except (ValueError, TypeError, LookupError) as error:
            text = f"line {number} has no responses_create_params.input. Use a dataset of NeMo Gym."
            raise UsageError(ErrorCode.INVALID_ROW, text) from error
        text = asked if isinstance(asked, str) else asked[-1]["content"]
        yield {"input": text if isinstance(text, str) else json.dumps(text), "label": line.strip()}


def addressed(row: Mapping[str, Any], session: Session) -> dict:
    """Returns the row with the session's address and key in its metadata, which its requests carry."""
    params = row["responses_create_params"]
    metadata = params.get("metadata") or {}
    own = json.loads(metadata.get("extra_body") or "{}")
    own[SESSION] = {"base_url": session.base_url, "api_key": session.api_key}
    metadata = metadata | {"extra_body": json.dumps(own)}
    return {**row, "responses_create_params": {**params, "metadata": metadata}}


def convert_result(answer: Mapping[str, Any]) -> dict:
    """Converts an agent's response to the episode's result; its other numbers become metrics. Raises
    RunError if the agent reports a failure."""
    if failure := answer.get("_ng_failure_class"):
        raise RunError(ErrorCode.EPISODES_FAILED, f"the agent's episode failed: {failure}")
    numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
    reward = numbers.pop("reward", None)
    cut = ((answer.get("response") or {}).get("incomplete_details") or {}).get("reason")
    return {
        "reward": reward,
        "truncated": cut == "max_output_tokens",
        "extra_logs": {name: float(value) for name, value in numbers.items() if name[0] != "_"},
    }


async def open_door(port: int) -> None:
    """Listens on a port of 127.0.0.1, which all engine processes of a machine share, and forwards each
    request to its episode's server."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", _hand_on)
    app.router.add_post("/tokenize", _hand_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_port=True).start()


async def _hand_on(request: web.Request) -> web.Response:
    body = await request.json()
    episode = body.pop(SESSION, None)
    if episode is None:
        text = f"the request has no {SESSION}; the agent must forward responses_create_params.metadata"
        return web.json_response({"error": {"message": text}}, status=401)
    for message in body["messages"]:
        for name in OF_TOKENS:
            message.pop(name, None)
    address = episode["base_url"].removesuffix("/v1") + request.path
    key = {"Authorization": f"Bearer {episode['api_key']}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
        client.post(address, json=body, headers=key) as response,
    ):
        return web.json_response(_as_vllm(await response.json(), body), status=response.status)


def _as_vllm(answer: dict, body: Mapping[str, Any]) -> dict:
    """Rewrites a response as NeMo Gym expects it of vLLM: token ids as token names, and "context length" in
    the message of that error."""
    if answer.get("error", {}).get("code") == "context_length_exceeded":
        answer["error"]["message"] += " (context length)"
    if body.get("return_tokens_as_token_ids"):
        for choice in answer.get("choices", ()):
            for entry in (choice.get("logprobs") or {}).get("content", ()):
                entry["token"] = f"token_id:{entry['token_id']}"
    return answer
