"""Agents that reach the policy over HTTP, by the `openai` client or any other program: one token stream per
conversation.

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt, label, session):
            answer = await session.client.chat.completions.create(
                model=session.model, messages=[{"role": "user", "content": prompt}]
            )
            return {"reward": float(label in answer.choices[0].message.content)}
"""

import asyncio
import copy
import logging
import os
import resource
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from openrlhf.agents.base import AgentExecutorBase, Engine, called, unproxied
from openrlhf.agents.chat_stream import ChatStream, Message, TemplateProblem, probe
from openrlhf.agents.wire import TEXT_ALONE, BadRequest, Object, Wire, as_event, openai_error, refuse
from openrlhf.completions import Completion, SamplingParams
from openrlhf.data.messages import decoded, join_text, read_calls
from openrlhf.errors import warn_once
from openrlhf.observability.hooks.load import find_points
from openrlhf.text import decode, token_ids_within

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MODEL = "policy"
CONNECTION_BACKLOG = 4096
"""Backlog of the server's socket: episodes that may connect at the same time."""
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
"""Request fields that the run's flags override: training needs log-probs of the distribution that was sampled
from."""


def _library():
    """Imports the optional package `openai`."""
    import openai

    return openai


class OpenAIAgentExecutor(AgentExecutorBase, ABC):
    """Runs an agent for each episode and serves its requests on 127.0.0.1, by one server per engine process,
    with the APIs of OpenAI and Anthropic. Every request is recorded. A continued conversation keeps its
    sampled tokens; a rewritten one begins a new sequence, which shares the reward."""

    writes_messages = True

    def __init__(self, tool_parser: str | None = None) -> None:
        """`tool_parser`: the name of the vLLM tool parser that finds tool calls in answers, such as hermes.
        None: requests with tools are refused."""
        _library()  # the import takes a second, which no episode should wait for
        super().__init__()
        self.tool_parser = tool_parser
        self._server = Server()

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Logs a warning for each answer that the chat template would render differently than it was
        sampled."""
        for remark in probe(tokenizer, with_tools=self.tool_parser is not None):
            logger.warning("%s The sampled tokens are kept.", remark)

    @abstractmethod
    async def run_agent(self, prompt: str, label: Any, session: "Session") -> Any:
        """Runs one episode, in a thread if it is not `async`. Returns the reward, or a dictionary with
        `reward` and optionally `scores` and `extra_logs`, see AgentExecutorBase."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        *,
        max_turns: int | None = None,
    ) -> dict:
        limits = max_length, self.tool_parser, max_turns
        session = Session(llm_engine, hf_tokenizer, sampling_params, *limits)
        async with self._server.serving(session):
            result = await called(partial(self.run_agent, prompt, label, session))
        return result if isinstance(result, dict) else {"reward": result}


class Session:
    """One episode's view of the server. A client in any process or language needs only `base_url` and
    `api_key`; the key identifies the episode of a request."""

    model = MODEL

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        sampling_params: SamplingParams,
        max_length: int,
        tool_parser: str | None = None,
        max_turns: int | None = None,
    ) -> None:
        self.api_key = f"sk-{secrets.token_urlsafe(24)}"
        self.base_url = ""
        self.engine, self.tokenizer, self.sampling_params = engine, tokenizer, sampling_params
        self.max_length, self.tool_parser, self.max_turns = max_length, tool_parser, max_turns
        self.stream = ChatStream(tokenizer)
        self.num_turns = 0
        self.branches: list[Branch] = []

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which a program's clients of OpenAI and Anthropic find the session."""
        token = {"ANTHROPIC_AUTH_TOKEN"} & os.environ.keys()  # the client would send it beside the key
        return {
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), self.base_url),
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", *token), self.api_key),
            **unproxied(),
        }

    @cached_property
    def client(self) -> "AsyncOpenAI":
        openai = _library()
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # no TLS: loading certificates takes 20 ms
        options: Any = {"http_client": plain, "max_retries": 0, "timeout": None}  # episodes have limits
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    async def complete(self, request: Mapping[str, Any]) -> dict:
        """Returns the response of /v1/chat/completions in OpenAI's format, with the token ids of prompt and
        answers. Raises BadRequest."""
        messages, tools = _messages(request), request.get("tools") or None
        known = [*(tools or ()), *(request.get("deferred_tools") or ())]  # those that the policy may call
        if known and self.tool_parser is None:
            raise BadRequest("tools: their calls need a parser, OpenAIAgentExecutor(tool_parser=...)")
        prompt_ids = self.build_prompt(messages, tools)
        params = self._params(request, len(prompt_ids))
        self._count_turn()
        answers = (await self.engine.generate(prompt_ids, params)).outputs
        choices = [self._choice(messages, tools, known, prompt_ids, params, answer) for answer in answers]
        if request.get("logprobs"):
            for choice, answer in zip(choices, answers, strict=True):
                choice["logprobs"] = {"content": self._log_probs(answer, request.get("top_logprobs") or 0)}
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": choices,
            "prompt_token_ids": prompt_ids,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": sampled,
                "total_tokens": len(prompt_ids) + sampled,
            },
        }

    def build_prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Returns the tokens of a conversation: those of the longest recorded conversation that it continues,
        as sampled, and those that the template writes after its last answer."""
        known = [b for b in self.branches if b.tools == tools and b.begins(messages)]
        if not known:
            return self._tokens(self.stream.render(messages, tools))
        branch = max(known, key=lambda b: len(b.messages))
        behind = self.stream.behind(messages, len(branch.messages) - 1, tools, branch.end)
        return branch.token_ids + self._tokens(behind)

    def _tokens(self, text: str) -> list[int]:
        return token_ids_within(self.tokenizer, text, self.max_length)

    @property
    def turns_left(self) -> int | None:
        """Number of requests that the episode may still make; None: no limit."""
        return None if self.max_turns is None else self.max_turns - self.num_turns

    def _count_turn(self) -> None:
        if self.turns_left == 0:
            text = (
                f"the episode has no turn of --train.max_turns {self.max_turns} left; see session.turns_left"
            )
            raise BadRequest(text, "max_turns_reached")
        self.num_turns += 1

    def _params(self, request: Mapping[str, Any], prompt_length: int) -> SamplingParams:
        """Returns the episode's sampling parameters with the fields that a request may set. Raises BadRequest
        if the prompt leaves no room for an answer."""
        room = self.max_length - prompt_length
        if room < 1:
            text = f"a prompt of {prompt_length} tokens leaves no room in --data.max_len {self.max_length}"
            raise BadRequest(text, "context_length_exceeded")
        params = copy.copy(self.sampling_params)
        if other := [k for k in SAMPLING_FIELDS if request.get(k) not in (None, getattr(params, k))]:
            ignored = f"{', '.join(other)}, which is ignored: the run's flags apply"
            warn_once(logger, f"an agent's requests set {ignored}")
        asked = request.get("max_completion_tokens") or request.get("max_tokens")
        params.max_tokens = min(room, asked or room, params.max_tokens or room)
        params.n = request.get("n") or 1
        if stop := request.get("stop"):
            params.stop = [stop] if isinstance(stop, str) else list(stop)
            params.detokenize = True
        if request.get("logprobs"):
            params.logprobs = request.get("top_logprobs") or 0
        return params

    def _choice(
        self,
        messages: Sequence[Message],
        tools: Any,
        known_tools: Any,
        prompt_ids: list[int],
        params: SamplingParams,
        answer: Completion,
    ) -> dict:
        token_ids = list(answer.token_ids)
        end = self._end_of(token_ids, params)
        text = decode(self.tokenizer, token_ids, after=prompt_ids).removesuffix(end)
        calls = self._tool_calls(text, known_tools) if known_tools else None
        ended_by = next((stop for stop in params.stop or () if stop in text), None)
        for stop in params.stop or ():
            text = text.partition(stop)[0]
        message = calls or {"role": "assistant", "content": text}
        self.branches.append(Branch([*messages, message], tools, [*prompt_ids, *token_ids], end))
        reason = "tool_calls" if calls else answer.finish_reason
        known = {"index": answer.index, "message": message, "finish_reason": reason}
        return known | {"stop_reason": ended_by, "token_ids": token_ids}

    def _end_of(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        """Returns the end-of-turn token of an answer as text; "" for a truncated answer."""
        stops = {*(params.stop_token_ids or ()), *self.tokenizer.all_special_ids}
        return str(self.tokenizer.decode(list(token_ids[-1:]))) if stops.intersection(token_ids[-1:]) else ""

    def _tool_calls(self, text: str, tools: Any) -> Message | None:
        from openrlhf.agents.tool_calls import find_calls  # imports vLLM, which agents without tools lack

        content, calls = find_calls(str(self.tool_parser), self.tokenizer, tools, text)
        return {"role": "assistant", "content": content, "tool_calls": calls} if calls else None

    def _log_probs(self, answer: Completion, count: int) -> list[dict]:
        def entry(token_id: int, log_prob: float) -> dict:
            text = self.tokenizer.convert_ids_to_tokens([token_id])[0]
            return {"token": text, "token_id": token_id, "logprob": log_prob, "bytes": None}

        rows = []
        sampled: Any = answer.logprobs
        for token_id, likely in zip(answer.token_ids, sampled, strict=True):
            best = sorted(likely.items(), key=lambda found: -found[1].logprob)[:count]
            top = [entry(other, found.logprob) for other, found in best]
            rows.append(entry(token_id, likely[token_id].logprob) | {"top_logprobs": top})
        return rows


@dataclass(frozen=True, slots=True)
class Branch:
    """A recorded conversation that ends with an answer of the policy."""

    messages: list[Message]
    tools: Any
    token_ids: list[int]
    """Tokens as the policy read and sampled them."""
    end: str
    """The sampled part of the template's text after the answer: the end-of-turn token, or "" if the answer
    was truncated."""

    def begins(self, messages: Sequence[Message]) -> bool:
        mine = self.messages
        return len(messages) > len(mine) and all(map(_same, mine, messages))


def _same(known: Message, given: Message) -> bool:
    """Compares a recorded message with one sent back by an agent, ignoring what clients change without a
    change of meaning: empty fields, text as parts, blank text, ids and JSON of calls."""
    return _plain(known) == _plain(given)


def _plain(message: Message) -> Message:
    text = join_text(message.get("content"))
    content = message.get("content") if text is None else text.strip() and text
    calls = [(call.get("name"), decoded(call.get("arguments"))) for call in read_calls(message)]
    plain = message | {"content": content, "tool_calls": calls, "function_call": None}
    return {k: v for k, v in plain.items() if v not in (None, "", [])}


class SessionExecutor(AgentExecutorBase, ABC):
    """Base class of executors whose episodes send messages to the policy in sessions."""

    writes_messages = True
    tool_parser: str | None = None

    @abstractmethod
    async def play(
        self, prompt: str, label: Any, session: Callable[[], Session], step_timeout: float | None
    ) -> dict:
        """Runs one episode, like AgentExecutorBase.execute. `session()` begins a session of the run."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: "PreTrainedTokenizerBase",
        llm_engine: Engine,
        *,
        max_turns: int | None = None,
        step_timeout: float | None = None,
    ) -> dict:
        limits = max_length, self.tool_parser, max_turns
        session = partial(Session, llm_engine, hf_tokenizer, sampling_params, *limits)
        return await self.play(prompt, label, session, step_timeout)


NOT_OFFERED = ("response_format", "logit_bias", "functions", "audio", "prediction")


def _messages(request: Mapping[str, Any]) -> list[Message]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list with at least one message is needed")
    refuse(request, NOT_OFFERED)
    if request.get("tools") and (choice := request.get("tool_choice") or "auto") != "auto":
        raise BadRequest(f"tool_choice: {choice}: the policy decides whether it calls a tool; leave it out")
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise BadRequest("messages: the last one is an answer, which is not continued; end with a question")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if others := {str(part.get("type")) for part in parts if isinstance(part, dict)} - {"text"}:
        raise BadRequest(f"messages: content of type {min(others)}: {TEXT_ALONE}")
    return messages


TOKENS = ("prompt_token_ids", "token_ids")
"""Fields of an answer that its stream leaves out: harnesses keep all events of a conversation."""
BODY_SECONDS = 60.0
"""Seconds within which the body of a request must arrive."""


class Server:
    """The HTTP server of an engine process. It starts with the first session, on a random port of 127.0.0.1,
    in the engine's event loop."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._starting: asyncio.Task[str] | None = None

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[None]:
        """Serves requests with the session's key while the context is open."""
        self._starting = self._starting or asyncio.create_task(self._start())
        session.base_url = f"{await asyncio.shield(self._starting)}/v1"
        self.sessions[session.api_key] = session
        try:
            yield
        finally:
            del self.sessions[session.api_key]
            if "client" in vars(session):
                await session.client.close()

    async def _start(self) -> str:
        """Starts the server and returns its address."""
        app = web.Application(client_max_size=64 << 20, middlewares=[_errors])
        app.router.add_get("/health", _health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        for wire in dict.fromkeys(wires().values()):
            app.router.add_post(wire.path, partial(self._answer, wire))
            if wire.counts:
                app.router.add_post(wire.counts, partial(self._count, wire))
            app.router.add_get(wire.path, _no_socket)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        _allow_many_files()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=CONNECTION_BACKLOG)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _session(self, request: web.Request, body: Mapping[str, Any] | None = None) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        sent = request.headers.get("X-Api-Key", bearer)
        key = (body or {}).get("session_key", sent)  # set by a client that several episodes share
        if (session := self.sessions.get(key)) is None:
            raise web.HTTPUnauthorized(text="no episode has this key; use session.api_key of run_agent")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        session = self._session(request, body)
        tokens = session.build_prompt(_messages(body), body.get("tools") or None)
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": session.max_length}
        return web.json_response(found)

    async def _count(self, wire: Wire, request: web.Request) -> web.Response:
        body = await _body(request)
        asked = _read(wire, body)
        tokens = self._session(request, body).build_prompt(_messages(asked), asked.get("tools") or None)
        return web.json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def _answer(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        session = self._session(request, body)
        answer = wire.write(body, await session.complete(_read(wire, body)))
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        events = wire.events(body, {k: v for k, v in answer.items() if k not in TOKENS})
        with suppress(ConnectionResetError):  # the client has gone, as a harness does that stops a sub-agent
            await response.prepare(request)
            for event in events:
                await response.write(as_event(event))
            await response.write(wire.last_event.encode())
        return response


def _allow_many_files() -> None:
    """Raises the limit of open files: both ends of each episode's connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _no_socket(request: web.Request) -> web.Response:
    """Refuses a WebSocket with the status after which Codex sends requests over HTTP at once."""
    return web.json_response(openai_error(426, "no WebSocket; POST requests", "upgrade_required"), status=426)


async def _body(request: web.Request) -> dict:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.json()
    except TimeoutError as error:
        raise BadRequest(f"the request took longer than {BODY_SECONDS:g} s to arrive") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object")
    return body


def _read(wire: Wire, body: dict) -> dict:
    try:
        return wire.read(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"the request does not have the form of this API: {error!r}") from error


def _events(request: Object, answer: dict) -> Iterator[dict]:
    """Yields a complete answer as the chunks of a streamed response: the engine returns answers as a
    whole."""
    common = {k: answer[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(choice: dict, delta: dict, reason: str | None = None) -> dict:
        of_choice = {"index": choice["index"], "delta": delta, "finish_reason": reason}
        return common | {"choices": [of_choice | {"logprobs": choice.get("logprobs")}]}

    for choice in answer["choices"]:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [call | {"index": i} for i, call in enumerate(calls)]
        yield chunk(choice, message)
        yield chunk(choice, {}, choice["finish_reason"])
    if (request.get("stream_options") or {}).get("include_usage"):
        yield common | {"choices": [], "usage": answer["usage"]}


CHAT = Wire(
    "/v1/chat/completions", dict, lambda request, answer: answer, _events, last_event="data: [DONE]\n\n"
)


@cache
def wires() -> dict[str, Wire]:
    """Maps paths to the APIs of the server: chat completions, and those that installed packages attach."""
    found = [CHAT, *(point.load() for point in find_points("wire"))]
    return {path: wire for wire in found for path in (wire.path, wire.counts) if path}


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Returns exceptions as error responses in the format of the request's API, which its client raises."""
    wire = wires().get(request.path, CHAT)
    refused = lambda status, text, code: web.json_response(wire.error(status, text, code), status=status)
    try:
        return await handler(request)
    except BadRequest as error:
        return refused(400, str(error), error.code)
    except TemplateProblem as error:
        return refused(400, str(error), "invalid_request_error")
    except web.HTTPException as error:
        return refused(error.status, error.text or error.reason, "invalid_request_error")
    except Exception as error:
        logger.exception("a request of an agent failed")
        return refused(500, f"{type(error).__name__}: {error}", "server_error")
