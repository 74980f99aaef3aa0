"""HTTP server for a reward model: requests, their validation and refusals, and shutdown. No text of a request
is ever logged."""

import asyncio
import hmac
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from openrlhf.api import ErrorCode, ServeRMConfig, Text, UsageError
from openrlhf.tools.serve.scoring import QueueFull, ScoreQueue

logger = logging.getLogger(__name__)

RETRY_AFTER = 1
"""Seconds after which a client may retry if the queue was full (Retry-After)."""


HEADER_SECONDS = BODY_SECONDS = 60.0
"""Seconds within which the header of a request must arrive, and then its body."""


class TimedHeaders(H11Protocol):
    """A connection that closes if no header arrives after its start, or after a response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_header()

    def on_response_complete(self) -> None:
        self._await_header()
        super().on_response_complete()

    def _await_header(self) -> None:
        last = self.cycle
        self.loop.call_later(HEADER_SECONDS, lambda: self.cycle is last and self.transport.close())


class Question(BaseModel):
    """Body of a request."""

    query: list[str]
    """Prompts and responses as text, special tokens kept."""
    prompts: list[str] | None = None
    """Prompt of each query. A query that begins with its prompt is tokenised with the prompt's own tokens, as
    in training. Other prompts have no effect, for example prompts without their template."""
    labels: list[Any] | None = None
    """Labels of the queries, which a reward model does not read."""


class Refusal(Exception):
    """Raised to refuse a request: becomes its HTTP response."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


def build_app(queue: ScoreQueue, config: ServeRMConfig) -> FastAPI:
    """Builds the app with POST /get_reward and GET /health."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if config.key is None:  # only this machine's programs may ask, not a site in its browser
        names = [config.host, "127.0.0.1", "localhost", "::1", "[::1]"]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse({"error": refusal.reason}, refusal.status, headers=refusal.headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {
            "ok": queue.is_working,
            "waiting": queue.num_waiting,
            "scoring": queue.num_scoring,
            "scored": queue.num_scored,
        }
        return JSONResponse(state, 200 if queue.is_working else 503)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        may_ask, kind = has_key(request, config.key), request.headers.get("Content-Type", "")
        if config.key is None and not kind.startswith("application/json"):  # browsers ask before they send it
            raise Refusal(415, "the header Content-Type must be application/json")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await read_body(request, int(config.max_body_mb * 2**20) if may_ask else 0)
        except TimeoutError:
            raise Refusal(
                408, f"the body took longer than {BODY_SECONDS:g} s", {"Connection": "close"}
            ) from None
        except ClientDisconnect:
            logger.warning("a client left before its request had arrived")
            raise Refusal(400, "the request did not arrive") from None
        if not may_ask:
            raise Refusal(401, "the key is missing or wrong", {"WWW-Authenticate": "Bearer"})
        if body is None:
            raise Refusal(413, f"the body is larger than --max_body_mb {config.max_body_mb:g}")
        texts = read_question(body, config)
        try:
            scored = await asyncio.wrap_future(queue.submit(texts))
        except QueueFull:
            reason = f"the queue is full (--max_queue {config.max_queue})"
            raise Refusal(503, reason, {"Retry-After": str(RETRY_AFTER)}) from None
        except RuntimeError as error:
            raise Refusal(500, str(error)) from error
        scores = [text.score for text in scored]
        cut = [float(text.is_cut) for text in scored]
        return {"rewards": scores, "scores": scores, "extra_logs": {"cut_by_reward_model": cut}}

    return app


def has_key(request: Request, key: str | None) -> bool:
    said = request.headers.get("Authorization", "")
    return key is None or hmac.compare_digest(said.encode(), f"Bearer {key}".encode())


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """Reads the body; returns None if it has more than `max_bytes`. All bytes are received, because a client
    that is cut off while sending never reads the response."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            body += chunk
        else:
            body.clear()
    return bytes(body) if size <= max_bytes else None


def read_question(body: bytes, config: ServeRMConfig) -> list[Text]:
    """Returns the texts of a request. Raises Refusal, which names the problem and quotes nothing of the
    body."""
    try:
        question = Question.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        # The message for broken JSON may quote some of it.
        reason = "the body is not JSON" if first["type"] == "json_invalid" else f"{place}: {first['msg']}"
        raise Refusal(422, reason) from None
    queries, prompts = question.query, question.prompts or []
    if not queries:
        raise Refusal(422, "query is empty")
    if len(queries) > config.max_texts:
        raise Refusal(413, f"query has {len(queries)} texts; --max_texts is {config.max_texts}")
    for name, values in (("prompts", question.prompts), ("labels", question.labels)):
        if values is not None and len(values) != len(queries):
            raise Refusal(422, f"{name} has {len(values)} items, query has {len(queries)}")
    for i, query in enumerate(queries):
        if not query:
            raise Refusal(422, f"query.{i} is an empty text")
        if len(query) > config.max_text_chars:
            raise Refusal(
                422, f"query.{i} has {len(query)} characters; --max_text_chars is {config.max_text_chars}"
            )
        if prompts and not occurs(prompts[i], query):
            raise Refusal(
                422,
                f"prompts.{i} does not occur in query.{i}: a query is the prompt and its response in one "
                "text; send both together, or leave prompts out",
            )
    is_chat = config.data.apply_chat_template
    return [prepare_text(query, prompts[i] if prompts else "", is_chat) for i, query in enumerate(queries)]


def occurs(prompt: str, query: str) -> bool:
    """Tells whether `prompt` occurs in `query`, ignoring white space, which templates and decoders change."""
    return "".join(prompt.split()) in "".join(query.split())


def prepare_text(query: str, prompt: str, is_chat: bool = False) -> Text:
    """Returns the text without trailing newlines, as `data/answers.py` prepares the training texts of reward
    models. The answer is marked if the query begins with the prompt."""
    text = query.rstrip("\n") or query
    has_border = prompt and text.startswith(prompt) and len(text) > len(prompt)
    spans = ((len(prompt), len(text)),) if has_border else ()
    return Text(text=text, spans=spans, is_chat=is_chat)


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded; connections are refused until the server listens. Raises
    UsageError if the port cannot be taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        text = f"this machine has no such address: {error.strerror}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--host", value=host) from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        text = f"cannot listen at {host}: {os.strerror(error.errno or 0)}; use another port"
        raise UsageError(ErrorCode.CLUSTER, text, flag="--port", value=port) from error
    return bound


def serve(app: FastAPI, bound: socket.socket, drain_seconds: float) -> None:
    """Serves until SIGTERM or Ctrl-C, then answers pending requests for up to `drain_seconds`."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=TimedHeaders,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
    )
    # uvicorn re-raises the signal at the end, which would turn an orderly exit into an error.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    bound.listen(2048)
    host, port = bound.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    print(f"rewards at http://{where}:{port}/get_reward", flush=True)
    server.run(sockets=[bound])
