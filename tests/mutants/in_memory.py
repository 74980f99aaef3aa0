"""Tries generated mutants in forks of one pytest process that has collected all tests.

A fork gives the mutated function its new code in memory. Modules that imported the function see the change,
because the function stays the same object. Nothing is imported again, so most mutants take a second.
"""

import importlib
import inspect
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
from mutants.covered import Coverage, FirstFailure
from mutants.generated import Generated

FORK = multiprocessing.get_context("fork")
LIMIT = 120.0
"""Seconds of CPU time that the tests of a mutant may take, besides ten times those of the original."""
PATIENCE = 5
"""Seconds that a fork may take for each second of its CPU time, which others may need at the same time."""
MEMORY = 8 << 30
"""Bytes that a mutant may allocate."""


class NotInMemory(Exception):
    """Raised if the mutant of a function changes more than its code, such as a default value."""


def swap(module: ModuleType, function: str, source: str) -> None:
    """Gives a function the code that it has in another source of its module. Raises NotInMemory, and
    SyntaxError."""
    old = _function(module, function)
    new = _code(compile(source, str(module.__file__), "exec", dont_inherit=True), function)
    if new == old.__code__ or new.co_freevars != old.__code__.co_freevars:
        raise NotInMemory(function)
    old.__code__ = new


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    for attribute in ("fget", "func"):  # of a property and a cached one
        found = getattr(found, attribute, None) or found
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType) or found.__code__.co_qualname != name:
        raise NotInMemory(name)
    return found


def _code(module: CodeType, name: str) -> CodeType:
    codes, found = [module], []
    while codes:
        inner = [constant for constant in codes.pop().co_consts if isinstance(constant, CodeType)]
        found += [code for code in inner if code.co_qualname == name]
        codes += inner
    if len(found) != 1:
        raise NotInMemory(name)
    return found[0]


class Outcome(NamedTuple):
    """Outcome of a fork."""

    item: Any
    result: Any
    """Result of its function; None if the fork took too long, or ended otherwise."""
    seconds: float


class _Fork(NamedTuple):
    item: Any
    process: Any
    folder: str
    """Folder of its temporary files."""
    start: float
    latest: float
    """Time at which it must have ended."""


def in_forks(
    work: Sequence[Any], function: Callable[[Any], Any], jobs: int, limit: Callable[[Any], float]
) -> Iterator[Outcome]:
    """Yields the outcomes of `function` for each item, as they finish. `limit`: seconds of CPU time for an
    item. Raises an error that `function` raises."""
    left, running = list(reversed(work)), {}
    while left or running:
        while left and len(running) < jobs:
            item = left.pop()
            receiver, fork = _start(item, function, limit(item))
            running[receiver] = fork
        ready = wait(list(running), timeout=1)
        late = [r for r, fork in running.items() if time.monotonic() > fork.latest]
        for receiver in {*ready, *late}:
            fork = running.pop(receiver)
            result = None
            if receiver in ready:
                with suppress(EOFError):
                    result = receiver.recv()
            _end(fork)
            if isinstance(result, Exception):
                raise result
            yield Outcome(fork.item, result, time.monotonic() - fork.start)


def _start(item: Any, function: Callable[[Any], Any], limit: float) -> tuple[Connection, _Fork]:
    receiver, sender = FORK.Pipe(duplex=False)
    folder = tempfile.mkdtemp(prefix="mutant-")
    process = FORK.Process(target=_in_fork, args=(item, function, limit, folder, sender))
    process.start()
    sender.close()
    start = time.monotonic()
    return receiver, _Fork(item, process, folder, start, start + PATIENCE * limit)


def _end(fork: _Fork) -> None:
    fork.process.join(5)
    with suppress(ProcessLookupError):
        os.killpg(fork.process.pid, signal.SIGKILL)
    fork.process.join()  # bounded: the process was killed
    shutil.rmtree(fork.folder, ignore_errors=True)


def _in_fork(
    item: Any, function: Callable[[Any], Any], limit: float, folder: str, sender: Connection
) -> None:
    os.setsid()
    log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    with open("/proc/self/statm") as memory:
        size = int(memory.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
    try:
        result = function(item)
    except Exception as error:
        result = error
    sender.send(result)
    sender.close()
    os._exit(0)


class Trials:
    """Pytest plugin that tries mutants instead of running the tests once."""

    def __init__(
        self,
        mutants: Sequence[Generated],
        seen: dict[str, Any],
        plan: Callable[[Generated, dict[str, Any]], list[list[str]]],
        jobs: int,
        note: Callable[[Generated | str, Any, float], None],
    ) -> None:
        """`seen`: the functions that tests run, by file; files that it lacks are recorded first, and those
        that pytest does not collect are left out. `plan`: the tests for a mutant. `note`: called with each
        mutant, the result and the seconds, and likewise with each file that was recorded."""
        self.mutants, self.seen, self.plan, self.jobs, self.note = mutants, seen, plan, jobs, note

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in session.items)
        self.seen = {file: entry for file, entry in self.seen.items() if file in files}
        for file, entry, seconds in in_forks(
            [file for file in files if file not in self.seen], self._record, self.jobs, lambda file: 900.0
        ):
            if entry is not None:
                self.seen[file] = entry
            self.note(file, entry, seconds)
        for mutant, result, seconds in in_forks(self.mutants, self._try, self.jobs, self._limit):
            self.note(mutant, result, seconds)
        return True

    def _tests(self, mutant: Generated) -> list[str]:
        return [test for tests in self.plan(mutant, self.seen) for test in tests if test in self.items]

    def _limit(self, mutant: Generated) -> float:
        usual = {test: of_test[0] for entry in self.seen.values() for test, of_test in entry["tests"].items()}
        return LIMIT + 10 * sum(usual[test] for test in self._tests(mutant))

    def _record(self, file: str) -> dict[str, Any]:
        start, coverage = time.monotonic(), Coverage(self.session.config.rootpath / "openrlhf")
        self.session.config.pluginmanager.register(coverage)
        self._run([item for item in self.items.values() if item.nodeid.partition("::")[0] == file])
        return {
            "seconds": time.monotonic() - start,
            "fixtures": sorted(coverage.fixtures),
            "tests": coverage.tests,
            "failed": coverage.failed,
        }

    def _try(self, mutant: Generated) -> tuple[str, str]:
        """Returns the outcome and the test that failed."""
        tests = self._tests(mutant)
        if not tests:
            return "not executed", ""
        module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
        try:
            swap(module, mutant.function, mutant.source(self.session.config.rootpath))
        except NotInMemory:
            return "not in memory", ""
        except SyntaxError:
            return "not valid", ""
        failure = FirstFailure()
        self.session.config.pluginmanager.register(failure)
        self._run([self.items[test] for test in tests], lambda: failure.failed is not None)
        return ("caught", failure.failed) if failure.failed else ("SURVIVED", "")

    def _run(self, items: Sequence[pytest.Item], done: Callable[[], bool] = lambda: False) -> None:
        sys.argv[:] = ["pytest"]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if not done():
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
