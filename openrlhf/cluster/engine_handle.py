"""Batches calls to an engine actor: one Ray call submits or returns several groups, because a call takes as
long as sampling a few tokens. `RayEngineHandle` is the dispatcher's side, `SamplingTasks` the engine's."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from itertools import count

from openrlhf.cluster.pending import Handle
from openrlhf.types import Prompt, Purpose, Sampled

Request = tuple[Prompt, Purpose, Sequence[int] | None]
"""Arguments of `EngineHandle.run_group`."""


class SamplingTasks:
    """The groups that an engine's process is sampling, and finished groups that were not fetched yet."""

    def __init__(self, run: Callable[[Prompt, Purpose, Sequence[int] | None], Awaitable[Sampled]]) -> None:
        self._run = run
        self._numbers: dict[asyncio.Future[Sampled], int] = {}
        self._finished: asyncio.Queue[asyncio.Future[Sampled]] = asyncio.Queue()

    def submit(self, requests: dict[int, Request]) -> None:
        """Starts sampling groups. Call it in the event loop that runs them. `requests`: request number ->
        request."""
        for number, request in requests.items():
            task = asyncio.ensure_future(self._run(*request))
            self._numbers[task] = number
            task.add_done_callback(self._finished.put_nowait)

    async def finished(self) -> dict[int, Sampled]:
        """Waits for at least one finished group. Returns request number -> group for all finished groups.
        Raises the exception of a group that failed."""
        tasks = [await self._finished.get()]  # bounded: by watchdog.py
        while not self._finished.empty():
            tasks.append(self._finished.get_nowait())
        return {self._numbers.pop(task): task.result() for task in tasks}  # bounded: done


class RayEngineHandle:
    """Sends requests to an engine's process. Requests that are made during a call are sent with the next
    call."""

    def __init__(self, engine: Handle) -> None:
        """`engine`: an actor with `submit_groups` and `finished_groups`."""
        self.engine = engine
        self._numbers = count()
        self._lock = threading.RLock()  # Ray runs callbacks in its own threads, or immediately in this one
        self._unsent: dict[int, Request] = {}
        self._waiting: dict[int, Future[Sampled]] = {}
        self._is_sending = self._is_fetching = False

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        future: Future[Sampled] = Future()
        with self._lock:
            number = next(self._numbers)
            self._unsent[number], self._waiting[number] = (prompt, purpose, samples), future
            self._advance()
        return future

    def _advance(self) -> None:
        """Starts the next submit call and the next fetch call, at most one of each at a time. The caller
        holds the lock."""
        if self._unsent and not self._is_sending:
            requests, self._unsent, self._is_sending = self._unsent, {}, True
            self.engine.submit_groups.remote(requests).future().add_done_callback(self._sent)
        if self._waiting and not self._is_fetching:
            self._is_fetching = True
            self.engine.finished_groups.remote().future().add_done_callback(self._fetched)

    def _sent(self, call: Future[None]) -> None:
        with self._lock:
            self._is_sending = False
            if error := call.exception():
                self._fail(error)
            self._advance()

    def _fetched(self, call: Future[dict[int, Sampled]]) -> None:
        with self._lock:
            self._is_fetching = False
            if error := call.exception():
                self._fail(error)
            else:
                for number, group in call.result().items():  # bounded: it is done
                    self._waiting.pop(number).set_result(group)
            self._advance()

    def _fail(self, error: BaseException) -> None:
        """Fails all waiting groups, because a dead engine and an exception in one group both end the run. The
        caller holds the lock."""
        waiting, self._waiting, self._unsent = self._waiting, {}, {}
        for future in waiting.values():
            future.set_exception(error)
