"""A process that calls a user's reward function. It may hang or die without affecting the caller."""

import asyncio
import inspect
import multiprocessing
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from openrlhf.agents.base import Reward, RewardError
from openrlhf.faults import fault
from openrlhf.rewards.calls import BatchFailed
from openrlhf.rewards.values import NotFinite, read_rewards
from openrlhf.user_file import (
    IMPORT_DEADLINE,
    ImportTimeout,
    UnusableFile,
    headline,
    import_place,
    import_problem,
    split,
)

DEFAULT = "reward_func"
"""Name of the function if a reference names none."""
FORM = "Define `def {}(queries, prompts, labels)` that returns {{'rewards': [...]}}."
ONE_SAMPLE_HINT = (
    ". The call had one sample: a function that compares the samples of a call\n(mean, deviation) needs "
    "several; --reward.batch 64 passes up to 64 that finish together."
)
"""Remedy in the message about a call with one sample whose result is not finite."""
RewardFunc = Callable[[list[str], list[str], list[Any]], Any]


def load_reward_func(reference: str) -> RewardFunc:
    """Imports the function that `reference` names, by default `reward_func`.

    Raises UnusableFile if the function is missing or does not accept three lists. Errors of the import are
    passed on.
    """
    place, name = split(reference)
    name, form = name or DEFAULT, FORM.format(name or DEFAULT)
    module = import_place(place, "reward_func")
    function = getattr(module, name, None)
    if not callable(function):
        found = ", ".join(own for own, value in vars(module).items() if inspect.isfunction(value))
        kind = "file" if place.endswith(".py") else "module"
        raise UnusableFile(f"the {kind} has no {name} (its functions: {found or 'none'}).\n{form}")
    if problem := _signature_problem(function, name):
        raise UnusableFile(f"{problem}.\n{form}")
    return function


class RewardProcess:
    """A process for a user's function. It starts at the first call, and again at the next call after it died.

    Each process has its own pipe, so that if it dies only its batch fails.
    """

    def __init__(
        self,
        reference: str,
        *,
        timeout: float,
        memory_gb: float | None = None,
        load: Callable[[str], Any] = load_reward_func,
    ) -> None:
        """`timeout`: seconds for one call. `memory_gb`: memory of the process; None: that of the machine.
        `load`: imports the callable that `reference` names."""
        self.name = split(reference)[1] or DEFAULT
        self.reference, self.timeout, self._load = reference, timeout, load
        self._memory = _machine_bytes() if memory_gb is None else int(memory_gb * 1e9)
        self._import_problem = ""
        # Not fork: the parent runs vLLM's and Ray's threads.
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    async def ask(self, queries: list[str], prompts: list[str], labels: list[Any]) -> list[Reward]:
        """Calls the function once. The previous call must have ended.

        Raises BatchFailed if the call fails, and RewardError if the function cannot be imported.
        """
        try:
            pipe = await self.ready()
            pipe.send((queries, prompts, labels))
            async with asyncio.timeout(self.timeout):
                answer = await self._receive(pipe)
        except TimeoutError:
            self.stop()
            raise BatchFailed(
                f"{self.reference}: {self.name} took longer than --reward.timeout {self.timeout:g} s",
                alone=True,
            ) from None
        except (EOFError, ConnectionError):
            raise BatchFailed(
                f"{self.reference}: {self.name}'s process died with exit code {self.stop()}", alone=True
            ) from None
        except BaseException:  # cancelled: the answer would be read by the next call
            self.stop()
            raise
        if isinstance(answer, str):
            raise BatchFailed(answer)
        return answer

    def stop(self) -> int | None:
        """Kills the process and its children. Returns its exit code; None if none was running."""
        process, self._process, self._pipe = self._process, None, None
        if process is None or process.pid is None:
            return None
        with suppress(ProcessLookupError):  # no process group: it died early, or the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()  # bounded: it was killed
        return process.exitcode

    async def ready(self) -> Connection:
        """Returns the pipe to a process that waits for calls, which it starts if needed. Raises RewardError
        if the import fails, and ImportTimeout if it does not end."""
        if self._import_problem:
            raise RewardError(self._import_problem)
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return self._pipe
        self.stop()
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve, args=(self.reference, self._load, theirs, self._memory)
        )
        self._process.start()
        theirs.close()  # so that reading raises EOFError when the process ends
        try:
            async with asyncio.timeout(IMPORT_DEADLINE):
                self._import_problem = await self._receive(self._pipe)
        except TimeoutError:
            self.stop()
            raise ImportTimeout(self.reference, IMPORT_DEADLINE) from None
        except (EOFError, ConnectionError):
            raise RewardError(
                f"{self.reference}: the process that imported the file died with exit code {self.stop()}"
            ) from None
        if self._import_problem:
            raise RewardError(self._import_problem)
        return self._pipe

    async def _receive(self, pipe: Connection) -> Any:
        """Returns the process's next message. Raises EOFError if the process has died, even if a child of the
        process keeps the pipe open."""
        assert self._process is not None and self._process.pid is not None
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        death = os.pidfd_open(self._process.pid)
        for end in (pipe.fileno(), death):
            loop.add_reader(end, ready.set)
        try:
            await ready.wait()  # bounded: the caller's timeout
        finally:
            for end in (pipe.fileno(), death):
                loop.remove_reader(end)
            os.close(death)
        if not pipe.poll():
            raise EOFError
        return pipe.recv()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _serve(reference: str, load: Callable[[str], Any], pipe: Connection, memory: int) -> None:
    """Serves calls until the other end of the pipe is closed. Where the function needs more than `memory`
    bytes, it gets a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    name = split(reference)[1] or DEFAULT
    os.setpgid(0, 0)  # a group of its own: killed with its children, not by Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        function = load(reference)
    except BaseException as error:  # including SystemExit
        pipe.send(import_problem(error, reference))
        return
    pipe.send("")
    with asyncio.Runner() as runner:  # one loop for all calls, so that clients kept by the file stay usable
        while True:
            try:
                queries, prompts, labels = pipe.recv()
            except EOFError:
                return
            fault("reward.call")
            pipe.send(_call(function, name, queries, prompts, labels, runner))


def _die_with_parent() -> None:
    """Kills the process group when the parent dies, even during a call that never ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # multiprocessing has started this process
    wait([parent.sentinel])  # bounded: a thread that waits for the end
    os.killpg(0, signal.SIGKILL)


def _signature_problem(function: Callable, name: str) -> str:
    """Returns the reason why the function does not accept three lists; "" if it does."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled functions may have no signature
        return ""
    try:
        signature.bind([], [], [])
    except TypeError as error:
        return f"{name}{signature} cannot be called with three lists: {error}"
    return ""


def _call(
    function: RewardFunc,
    name: str,
    queries: list[str],
    prompts: list[str],
    labels: list[Any],
    runner: asyncio.Runner,
) -> list[Reward] | str:
    """Calls the function. Returns the rewards, or an error message, because exceptions may not be
    picklable."""
    try:
        answer = function(queries, prompts, labels)
        if inspect.iscoroutine(answer):
            answer = runner.run(answer)
    except RewardError as error:
        return str(error)
    except BaseException as error:  # including SystemExit
        return f"{name} raised {headline(error)}\n{traceback.format_exc(limit=-3)}"
    try:
        return read_rewards(answer, len(queries))
    except NotFinite as error:
        return f"{error}{ONE_SAMPLE_HINT}" if len(queries) == 1 else str(error)
    except RewardError as error:
        return str(error)
