"""A vLLM engine in a process with its own session (setsid), for interactive use. Ctrl-C on a terminal signals
every process of the terminal's session; in another session the engine survives, and only its current answer
is stopped."""

import asyncio
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.completions import SamplingParams
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.types import not_none


class VLLMStream:
    """A vLLM engine in another process that streams one answer at a time."""

    def __init__(self, options: EngineOptions) -> None:
        """Starts the engine, and returns when the model is loaded. Raises UsageError for options that the
        engine refuses, and RunError if it fails."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), name="vllm")
        self._process.start()
        theirs.close()
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        # A thread reads, because Ctrl-C could interrupt the main thread in the middle of a message.
        threading.Thread(target=self._listen, name="vllm messages", daemon=True).start()
        try:
            kind, value = self._messages.get()  # bounded: the process's end is a message too
        except KeyboardInterrupt:
            self._kill()
            raise
        if kind == "refused":
            raise value
        if kind != "ready":
            raise RunError(ErrorCode.ENGINE_FAILED, f"the vLLM engine did not start: {value}")

    def stream(self, prompt: list[int], seed: int, params: SamplingParams) -> Generator[int, None, None]:
        """Yields the tokens of the answer. Closing the generator stops generation. Raises RunError if the
        engine fails."""
        self._connection.send((prompt, seed, params))
        kind, value = "tokens", ()
        try:
            while kind == "tokens":
                yield from value
                kind, value = self._messages.get()  # bounded: the process's end is a message too
        finally:
            if kind == "tokens":
                self._connection.send(_STOP)
                while kind == "tokens":
                    kind, value = self._messages.get()  # bounded: the process's end is a message too
        if kind == "error":
            raise RunError(ErrorCode.ENGINE_FAILED, f"the vLLM engine failed: {value}")

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(_QUIT)
        self._process.join(timeout=CLOSE_TIMEOUT)
        if self._process.is_alive():
            self._kill()

    def _kill(self) -> None:
        """Kills the engine with its child processes. While it is starting it has no session of its own."""
        with suppress(ProcessLookupError):
            os.killpg(not_none(self._process.pid), signal.SIGKILL)
        self._process.kill()

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            self._messages.put(("error", "its process has ended"))


_STOP, _QUIT = "stop", "quit"
"""Messages instead of a request: stop the current answer, end the process."""

CLOSE_TIMEOUT = 30.0
"""Seconds that an engine may take to shut down."""


def _serve(connection: Connection, options: EngineOptions) -> None:
    os.setsid()
    os.environ.update(engine_environment(options))
    try:
        asyncio.run(_Server(connection, VLLMEngine(options)).run())
    finally:
        for process in multiprocessing.active_children():
            process.kill()  # otherwise this process would wait for it forever


class _Server:
    """The engine's process: reads requests from the connection and writes tokens to it."""

    def __init__(self, connection: Connection, engine: VLLMEngine) -> None:
        self.connection, self.engine = connection, engine

    async def run(self) -> None:
        try:
            await self.engine.start()
        except UsageError as error:
            self.connection.send(("refused", error))
            return
        except Exception as error:
            self.connection.send(("error", f"{type(error).__name__}: {error}"))
            raise
        answer: asyncio.Task | None = None
        try:
            self.connection.send(("ready", None))
            while (request := await asyncio.to_thread(self.connection.recv)) != _QUIT:
                if request != _STOP:
                    answer = asyncio.create_task(self._answer(*request))
                    answer.add_done_callback(self._on_end)
                elif answer is not None:
                    answer.cancel()
        except (EOFError, OSError):  # the other side has closed
            pass
        finally:
            self.engine.shutdown()

    async def _answer(self, prompt: list[int], seed: int, params: SamplingParams) -> None:
        async for token_ids in self.engine.stream(prompt, replace(params, seed=seed)):
            self.connection.send(("tokens", token_ids))

    def _on_end(self, answer: asyncio.Task) -> None:
        error = None if answer.cancelled() else answer.exception()
        with suppress(OSError):  # the other side has closed
            self.connection.send(("end", None) if error is None else ("error", str(error)))
