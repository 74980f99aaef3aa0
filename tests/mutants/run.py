"""Puts each mutant into a copy of the repository and runs the tests that can see it: `make mutants`.

    python -m mutants.run [--only ID ...] [--class NAME] [--sample 12 --seed COMMIT] [--jobs 2]
    python -m mutants.run --generated 400 --seed 1

The tests that a record names come first. If they pass, the unit tests that run the changed function follow,
cheap ones before expensive ones, up to the first that fails. Generated mutants are tried with the tests of
`make fast` alone. Which tests run which functions is recorded once and kept in .pytest_cache, by the content
of each test file. Tests run in forks of a process that has imported the large libraries.
"""

import argparse
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mutants.catalogue import ROOT, DoesNotApply, Mutant, load, mutated
from mutants.covered import Coverage, Selection

CACHE = ROOT / ".pytest_cache"
PRELOADED = ("torch", "transformers", "datasets", "peft", "hypothesis", "ray", "vllm", "deepspeed", "pytest")
FIRST_FILES = 3
"""Number of test files that run before all others, which saves the imports of the others."""
LIMIT = 900.0
"""Seconds that pytest may take for one mutant. A mutant may run forever, which counts as caught."""
FORK = multiprocessing.get_context("fork")
PYTEST = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--durations=0", "--durations-min=1e9")


class Suite(NamedTuple):
    """Tests that are tried with mutants."""

    folders: tuple[str, ...]
    marks: str
    """The expression that chooses tests by their marks."""
    records: Path
    """The file that keeps the functions that these tests run."""


UNIT = Suite(("tests/unit",), "not slow and not gpu", CACHE / "mutants.json")
"""For the mutants of the catalogue."""
FAST = Suite(
    ("tests/unit", "tests/contracts"), "not slow and not processes and not gpu", CACHE / "fast_mutants.json"
)
"""For generated mutants: the tests of `make fast`."""

copy: Path
"""The copy of the repository that this process changes."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of the tests with one mutant."""

    mutant: Mutant
    outcome: str = "SURVIVED"
    """`caught`, `SURVIVED`, or the reason why the mutant is not valid."""
    test: str = ""
    seconds: float = 0.0


def main() -> None:
    options = _options()
    start = time.monotonic()
    if options.generated:
        print(_try_generated(options))
        return
    mutants = _chosen(load(), options)
    if options.runs is not None:
        from mutants.runs import (
            RUNS,
            summary,
            try_in_runs,
        )  # imports the package, which tests import in forks

        print(summary(try_in_runs(mutants, options.runs or list(RUNS), options.jobs)))
        return
    _preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        pool = ProcessPoolExecutor(options.jobs, mp_context=FORK, initializer=_copy, initargs=(folder,))
        with pool:
            _check_unchanged(pool, mutants)
            known = [(mutant, [mutant.tests]) for mutant in mutants if mutant.tests]
            results = [result for result in _map(pool, _try, known) if result.outcome != "SURVIVED"]
            done = {result.mutant.id for result in results}
            if left := [mutant for mutant in mutants if mutant.id not in done]:
                seen = _seen(pool)
                results += _map(pool, _try, [(mutant, _plan(mutant, seen)) for mutant in left])
    if options.record:
        Path(options.record).write_text(json.dumps({r.mutant.id: r.test for r in results if r.test}))
    print(_table(results))
    print(f"{len(results)} mutants in {(time.monotonic() - start) / 60:.1f} minutes")
    sys.exit(any(result.outcome != "caught" for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the tests against silent bugs that they must catch.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="only the mutants with these ids")
    parser.add_argument("--class", dest="group", help="only the mutants whose class contains this text")
    parser.add_argument("--reported", action="store_true", help="the mutants that other frameworks reported")
    parser.add_argument(
        "--runs",
        nargs="*",
        metavar="RUN",
        help="tries them in whole runs, without tests: sft, rl, ppo, lora, async",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="a random choice of N mutants")
    parser.add_argument("--seed", default="", help="text that determines the sample, such as a commit's hash")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument(
        "--generated",
        type=int,
        metavar="N",
        help="N mutants that mutmut's operators make, tried with `make fast`'s tests",
    )
    parser.add_argument(
        "--places", nargs="+", metavar="GLOB", help="files of generated mutants, such as 'models/*.py'"
    )
    parser.add_argument(
        "--results",
        metavar="FILE",
        type=Path,
        default=CACHE / "generated.jsonl",
        help="outcomes of generated mutants, as JSON lines; those that it has are not tried again",
    )
    parser.add_argument("--again", action="store_true", help="tries generated mutants that survived again")
    parser.add_argument("--record", metavar="FILE", help="writes which test caught which mutant, as JSON")
    options = parser.parse_args()
    if options.places and not options.generated:
        parser.error("--places needs --generated N: the catalogue's mutants have places of their own")
    return options


def _chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    if unknown := set(options.only or ()) - {mutant.id for mutant in mutants}:
        sys.exit(f"--only: no mutant is called {', '.join(sorted(unknown))}")
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.id in options.only]
    if options.group:
        mutants = [mutant for mutant in mutants if options.group in mutant.group]
    if options.reported:
        mutants = [mutant for mutant in mutants if mutant.threads]
    if options.sample and options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    return mutants or sys.exit("error: no mutant matches --only and --class")


def _preload() -> None:
    """Imports the large libraries once for all forks, under the settings of the package and the tests."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("openrlhf", *PRELOADED):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]
    gc.freeze()  # pytest collects garbage at its end, which takes seconds with these libraries


def _copy(folder: str) -> None:
    global copy
    copy = Path(tempfile.mkdtemp(dir=folder))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).split("\0"):
        if name not in ("", ".venv") and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    (copy / ".venv").symlink_to((ROOT / ".venv").resolve())


def _map(pool: ProcessPoolExecutor, function: Callable[[Any], Any], work: Sequence[Any]) -> Iterable[Any]:
    """Yields the results as they finish, and prints those of mutants."""
    futures = [pool.submit(function, item) for item in work]
    for future in as_completed(futures):
        result = future.result()
        if isinstance(result, Result):
            line = f"{result.outcome:9} {result.seconds:6.1f} s  {result.mutant.id}  {result.test}"
            print(line, flush=True)
        yield result


def _check_unchanged(pool: ProcessPoolExecutor, mutants: Sequence[Mutant]) -> None:
    """Exits with an error if a test that a record names does not exist or fails without the mutant."""
    named = sorted({test for mutant in mutants for test in mutant.tests})
    halves = [part for part in (named[::2], named[1::2]) if part]
    for found in _map(pool, _run_tests, halves):
        if found.failed or found.not_collected:
            sys.exit(f"{found.failed or found.not_collected[0]} fails without any mutant")
    for test in named:
        path, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if f"def {function}(" not in (ROOT / path).read_text():
            sys.exit(f"{test}: no such test")


def _try(work: tuple[Any, Sequence[Sequence[str]]]) -> Result:
    """Runs batches of tests against a mutant, up to the first test that fails."""
    mutant, batches = work
    start, file = time.monotonic(), copy / mutant.path
    result = partial(Result, mutant=mutant)
    try:
        source = mutated(mutant, copy) if isinstance(mutant, Mutant) else mutant.source(copy)
        original = file.read_text()
    except DoesNotApply as error:
        return result(outcome=str(error))
    try:
        _write(file, source)
        for tests in batches:
            found = _run_tests(tests)
            seconds = time.monotonic() - start
            if found.not_collected:
                return result(outcome="not silent", test=found.not_collected[0], seconds=seconds)
            if found.failed:
                return result(outcome="caught", test=found.failed, seconds=seconds)
        return result(seconds=time.monotonic() - start)
    finally:
        _write(file, original)


def _write(file: Path, source: str) -> None:
    """Writes a module and removes its byte code: Python would reuse that of a file of the same size and
    second."""
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
    file.write_text(source)


@dataclass(frozen=True)
class Run:
    """Outcome of a pytest run."""

    failed: str | None = None
    not_collected: Sequence[str] = ()


def _run_tests(tests: Sequence[str]) -> Run:
    """Runs tests in their order up to the first that fails."""
    selection = Selection(tests)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    limit = LIMIT
    try:
        return _fork(limit, lambda: _pytest_selected(files, selection))
    except TimeoutError:
        return Run(failed=f"{tests[0]} or a later test, which did not end in {limit:.0f} s")


def _pytest_selected(files: list[str], selection: Selection) -> Run:
    import pytest

    code = pytest.main([*PYTEST, "-x", *files], plugins=[selection])
    if selection.ran == 0 and not selection.failed and not selection.not_collected:
        raise RuntimeError(f"pytest ended with {code} and ran none of {list(selection.order)[:3]}")
    return Run(selection.failed, selection.not_collected)


def _fork(limit: float | None, function: Callable[[], Any]) -> Any:
    """Returns the result of a function that runs in the copy, in a fork with its own process group.

    Raises TimeoutError after `limit` seconds, if there is a limit, and RuntimeError if the fork dies or its
    function raises.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_in_copy, args=(function, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise TimeoutError
        result = receiver.recv()
    except EOFError:
        raise RuntimeError(f"a test process ended; its output is in {copy / 'mutants.log'}") from None
    finally:
        process.join(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if isinstance(result, Exception):
        raise RuntimeError(f"{result!r}; output: {(copy / 'mutants.log').read_text()[-3000:]}")
    return result


def _in_copy(function: Callable[[], Any], sender: Connection) -> None:
    os.setsid()
    log = os.open(copy / "mutants.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [
        str(copy),
        *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))),
    ]
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]
    try:
        result = function()
        sender.send(result)
    except Exception as error:
        sender.send(error)
    sender.close()
    sys.stdout.flush()
    os._exit(0)


def _seen(pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Returns the record of each test file: its tests, and the functions that they run. Files that changed
    since they were recorded are recorded again."""
    seen, digest = _cached(UNIT)
    for file, entry in _map(pool, _record, [file for file in digest if file not in seen]):
        seen[file] = entry | {"digest": digest[file]}
        print(f"recorded  {entry['seconds']:6.1f} s  {file}", flush=True)
        _keep(UNIT, seen)
    return seen


def _cached(suite: Suite) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the kept records of test files that have not changed since, and the digests of all files."""
    cached = json.loads(suite.records.read_text()) if suite.records.exists() else {}
    digest = {
        str(file.relative_to(ROOT)): hashlib.sha256(file.read_bytes()).hexdigest()
        for folder in suite.folders
        for file in sorted((ROOT / folder).rglob("test_*.py"))
    }
    return {file: entry for file, entry in cached.items() if digest.get(file) == entry["digest"]}, digest


def _keep(suite: Suite, seen: dict[str, Any]) -> None:
    suite.records.parent.mkdir(exist_ok=True)
    suite.records.write_text(json.dumps(seen))


def _record(file: str) -> tuple[str, dict[str, Any]]:
    return file, _fork(LIMIT, lambda: _pytest_recorded(file))


def _pytest_recorded(file: str) -> dict[str, Any]:
    import pytest

    start, coverage = time.monotonic(), Coverage(copy / "openrlhf")
    code = pytest.main([*PYTEST, "-m", UNIT.marks, file], plugins=[coverage])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code}")
    return {
        "seconds": time.monotonic() - start,
        "fixtures": sorted(coverage.fixtures),
        "tests": coverage.tests,
        "failed": coverage.failed,
    }


def _try_generated(options: argparse.Namespace) -> str:
    """Tries generated mutants in memory, or in a copy where memory is not enough. Returns a table."""
    from mutants.generated import PLACES, Results, sample, summary  # mutmut is an optional package

    places = options.places or PLACES
    for place in places:
        if not list((ROOT / "openrlhf").glob(place)):
            sys.exit(f"--places: no file of openrlhf/ matches {place}")
    mutants = sample(options.generated, options.seed, places=places)
    results = Results(options.results.resolve())
    left = [mutant for mutant in mutants if results.wants(mutant, options.again)]
    if left:
        _preload()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            _copy(folder)
            seen = _fork(None, partial(_pytest_trials, left, options.jobs, results, os.dup(1)))
            others = [(m, _plan(m, seen)) for m in left if results.outcome(m) == "not in memory"]
            with ProcessPoolExecutor(options.jobs, FORK, initializer=_copy, initargs=(folder,)) as pool:
                for result in _map(pool, _try, others):
                    results.add(result.mutant, result.outcome, result.test, result.seconds)
    return summary(mutants, results)


def _pytest_trials(mutants: Sequence[Any], jobs: int, results: Any, console: int) -> dict[str, Any]:
    """Tries mutants in memory, and prints to `console`. Returns the records of the test files."""
    import pytest
    from mutants.in_memory import Trials

    seen, digest = _cached(FAST)

    def note(item: Any, result: Any, seconds: float) -> None:
        if isinstance(item, str):
            outcome, test = "recorded" if result else "NOT RECORDED", item
            if result:
                seen[item] = result | {"digest": digest[item]}
                _keep(FAST, seen)
        else:
            outcome, test = result or ("caught", "the process ended, or took too long")
            results.add(item, outcome, test, seconds)
        os.write(console, f"{outcome:9} {seconds:6.1f} s  {getattr(item, 'id', '')}  {test}\n".encode())

    trials = Trials(mutants, dict(seen), _plan, jobs, note)
    pytest.main([*PYTEST, "-m", FAST.marks, *FAST.folders], plugins=[trials])
    return trials.seen


def _plan(mutant: Any, seen: dict[str, Any]) -> list[list[str]]:
    """Returns the tests that run the mutant's function, in two batches: first the files whose tests run
    little else, then the others, cheap ones first.

    If the mutant changes a class or a module outside its functions, the tests that run any function of it
    count.
    """
    place = f"{mutant.path.removeprefix('openrlhf/')}:{mutant.function}".removesuffix(":")
    runs = lambda functions: any(
        name == place or (name.startswith(place) and name[len(place)] in ".:") for name in functions
    )
    files = []
    for entry in seen.values():
        in_fixture = runs(entry["fixtures"])
        found = [
            (test, *of_test) for test, of_test in entry["tests"].items() if in_fixture or runs(of_test[1])
        ]
        if found:
            breadth = fmean(len(functions) for _, _, functions in found)
            files.append((breadth, sum(seconds for _, seconds, _ in found), [test for test, *_ in found]))
    files.sort()
    first, rest = files[:FIRST_FILES], sorted(files[FIRST_FILES:], key=lambda file: file[1])
    batches = ([test for *_, tests in some for test in tests] for some in (first, rest))
    return [batch for batch in batches if batch]


def _table(results: Sequence[Result]) -> str:
    """Formats the results, survivors first."""
    order = sorted(results, key=lambda result: (result.outcome == "caught", result.mutant.group))
    rows = [("", "mutant", "class", "seconds", "by")]
    rows += [
        (result.outcome, result.mutant.id, result.mutant.group, f"{result.seconds:.1f}", result.test)
        for result in order
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    main()
