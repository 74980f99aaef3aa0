"""A process that calls a user's reward function. It may hang or die without affecting the caller."""

import asyncio
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from openrlhf.agents.base import Reward, RewardError
from openrlhf.errors import print_all_characters
from openrlhf.faults import fault
from openrlhf.rewards.calls import BatchFailed
from openrlhf.rewards.values import NotFinite, WrongNumber, read_rewards
from openrlhf.user_file import (
    IMPORT_DEADLINE,
    ImportTimeout,
    UnusableFile,
    call_problem,
    headline,
    import_place,
    import_problem,
    program_hidden,
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
OTHERS = {"completions": "TRL or ms-swift", "solution_str": "verl"}
"""Arguments of reward functions of other libraries, which would get other values here."""
RewardFunc = Callable[[list[str], list[str], list[Any]], Any]
"""A function of the samples' texts, which returns what `read_rewards` reads."""
TAKES = ("queries", "prompts", "labels")
"""Arguments of a reward function: lists with one entry for each sample."""

HEAD = struct.Struct("!QQ")  # of a message: number of its call (0: the import), size of its pickle


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
    arguments: Iterable[str] = ()
    with suppress(ValueError):  # some compiled functions have no signature
        arguments = inspect.signature(function).parameters
    for library in (OTHERS[argument] for argument in arguments if argument in OTHERS):
        text = f"{name} has arguments of {library}; here query.removeprefix(prompt) is the response"
        raise UnusableFile(f"{text}.\n{form}")
    if problem := call_problem(function, name, *TAKES):
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
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._memory = whole if memory_gb is None else int(memory_gb * 1e9)
        self._import_problem = ""
        # Not fork: the parent runs vLLM's and Ray's threads.
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: socket.socket | None = None

    async def ask(self, queries: list[str], prompts: list[str], labels: list[Any]) -> list[Reward]:
        """Calls the function once. The previous call must have ended.

        Raises BatchFailed if the call fails, and RewardError if the function cannot be imported.
        """
        try:
            await self.ready()
            async with asyncio.timeout(self.timeout):
                answer = await self._answer(queries, prompts, labels)
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
        if isinstance(answer, WrongNumber):
            raise answer
        return answer

    def stop(self) -> int | None:
        """Kills the process and its children. Returns its exit code; None if none was running."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None or process.pid is None:
            return None
        with suppress(ProcessLookupError):  # no process group: it died early, or the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()  # bounded: it was killed
        return process.exitcode

    async def ready(self) -> None:
        """Starts the process if needed, and waits for its import. Raises RewardError or ImportTimeout."""
        if self._import_problem:
            raise RewardError(self._import_problem)
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return
        self.stop()
        self._number, (self._pipe, theirs) = 0, socket.socketpair()
        self._process = self._context.Process(
            target=_serve, args=(self.reference, self._load, theirs, self._memory)
        )
        with program_hidden():
            self._process.start()
        theirs.close()  # so that reading ends when the process ends
        try:
            async with asyncio.timeout(IMPORT_DEADLINE):
                self._import_problem = await self._answer()
        except TimeoutError:
            self.stop()
            raise ImportTimeout(self.reference, IMPORT_DEADLINE) from None
        except (EOFError, ConnectionError):
            raise RewardError(
                f"{self.reference}: the process that imported the file died with exit code {self.stop()}"
            ) from None
        if self._import_problem:
            raise RewardError(self._import_problem)

    async def _answer(self, *call: Any) -> Any:
        """Sends a call, if any, and returns the process's answer. Raises EOFError or ConnectionError if the
        process has died, even if a child of the process keeps the pipe open."""
        assert self._process is not None and self._process.pid is not None and self._pipe is not None
        loop, pipe, death = asyncio.get_running_loop(), self._pipe.dup(), os.pidfd_open(self._process.pid)
        reader, writer = await asyncio.open_unix_connection(sock=pipe)
        loop.add_reader(death, pipe.shutdown, socket.SHUT_RDWR)  # what was sent before can still be read
        try:
            if call:
                self._number += 1
                writer.write(_message(self._number, call))
            number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
            if number != self._number:
                raise BatchFailed(f"{self.reference}: its process answered another call", alone=True)
            return pickle.loads(await reader.readexactly(size))
        finally:
            loop.remove_reader(death)
            os.close(death)
            writer.transport.abort()


def _message(number: int, content: Any) -> bytes:
    data = pickle.dumps(content)
    return HEAD.pack(number, len(data)) + data


def _serve(reference: str, load: Callable[[str], Any], pipe: socket.socket, memory: int) -> None:
    """Serves calls until the other end of the pipe is closed. Where the function needs more than `memory`
    bytes, it gets a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    print_all_characters()
    name = split(reference)[1] or DEFAULT
    os.setpgid(0, 0)  # a group of its own: killed with its children, not by Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe.set_inheritable(False)
    try:
        with _forks_end():
            function = load(reference)
    except BaseException as error:  # including SystemExit
        pipe.sendall(_message(0, import_problem(error, reference)))
        return
    pipe.sendall(_message(0, ""))
    calls = pipe.makefile("rb")
    with asyncio.Runner() as runner:  # one loop for all calls, so that clients kept by the file stay usable
        while head := calls.read(HEAD.size):
            number, size = HEAD.unpack(head)
            queries, prompts, labels = pickle.loads(calls.read(size))
            fault("reward.call")
            pipe.sendall(_message(number, _call(function, name, queries, prompts, labels, runner)))


@contextmanager
def _forks_end() -> Iterator[None]:
    """Ends a process that users' code forks when it leaves that code: only the one asked must answer."""
    process, status = os.getpid(), None
    try:
        yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if os.getpid() != process and not isinstance(error, SystemExit):
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status & 0xFF if isinstance(status, int) else status is not None)


def _die_with_parent() -> None:
    """Kills the process group when the parent dies, even during a call that never ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # multiprocessing has started this process
    wait([parent.sentinel])  # bounded: a thread that waits for the end
    os.killpg(0, signal.SIGKILL)


def _call(
    function: RewardFunc,
    name: str,
    queries: list[str],
    prompts: list[str],
    labels: list[Any],
    runner: asyncio.Runner,
) -> Any:
    """Calls the function. Returns rewards, a WrongNumber, or another error's message, which is picklable."""
    count = len(queries)  # the function may empty its lists
    try:
        with _forks_end():
            answer = function(queries, prompts, labels)
            if inspect.iscoroutine(answer):
                answer = runner.run(answer)
            return read_rewards(answer, count)  # may run users' code: a generator of rewards
    except WrongNumber as error:
        return error
    except NotFinite as error:
        return f"{error}{ONE_SAMPLE_HINT}" if count == 1 else str(error)
    except RewardError as error:
        return str(error)
    except BaseException as error:  # including SystemExit
        return f"{name} raised {headline(error)}\n{traceback.format_exc(limit=-3)}"
