"""Processes of a stage: started, watched, and ended with all of their descendants. Standard library only."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
STACKS = Path(__file__).with_name("stacks")
MARK = "GPUKIT_STAGE"
"""Environment variable that descendants inherit, even those that leave the process group, as Ray's and vLLM's
do."""
POLL_S = 0.1
STACKS_S = 5.0
"""Seconds that processes get to write their stacks."""
LARGEST_LOG = 8 * 2**20
KEPT_LOG = 2**20
"""Bytes that stay at the end of a log that grows too long."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result, exit and stacks of a stage that has ended."""

    result: dict[str, Any] | None
    """Content of its result file; None if it wrote none."""
    code: int | None
    """Exit code; None if it was stopped at its limit."""
    seconds: float
    stacks: str
    """Stacks of its processes if it was stopped, else empty."""


def run_stage(name: str, options: list[str], *, folder: Path, log: Path, limit: float) -> Ended:
    """Runs one stage in processes of its own, which have all ended when this returns or raises.

    folder: an empty folder for the result and the stacks. log: file that receives the output as it comes.
    """
    (folder / "stacks").mkdir()
    result = folder / "result.json"
    mark = secrets.token_hex(8)
    entry = str(ROOT / "benchmarks" / "gpu.py")
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, entry, "--inside", name, "--result", str(result), *options],
        env=environment(folder, mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )
    writer = threading.Thread(target=write_log, args=(process.stdout, log), daemon=True)
    writer.start()
    try:
        code = wait(process, start + limit)
        stacks = "" if code is not None else all_stacks(mark, folder / "stacks")
    finally:
        end_all(process, mark)
        writer.join(STACKS_S)
    seconds = time.monotonic() - start
    return Ended(result=read_result(result), code=code, seconds=seconds, stacks=stacks)


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Returns the variables of a stage. PYTHONPATH keeps its entries, such as wheels that were carried
    along."""
    carried = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [str(STACKS), str(ROOT), *map(os.path.abspath, carried)]
    return os.environ | {
        MARK: mark,
        "GPUKIT_STACKS": str(folder / "stacks"),
        "SPT_NOENV": "1",  # processes that name themselves (setproctitle) keep their variables
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENRLHF_CACHE": str(folder / "cache"),
        "RAY_ADDRESS": "local",
    }


def wait(process: subprocess.Popen, deadline: float) -> int | None:
    """Returns the exit code, or None if the process lives beyond the deadline."""
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return code


def write_log(output: IO[bytes], log: Path) -> None:
    """Writes the stage's output to the log as it comes, and cuts out the middle of a log that grows too
    long."""
    with log.open("r+b") as file:
        while printed := os.read(output.fileno(), 2**16):
            file.write(printed)
            file.flush()
            if file.tell() > LARGEST_LOG:
                content = log.read_bytes()
                file.seek(0)
                file.truncate()
                file.write(content[: KEPT_LOG // 4] + b"\n[cut]\n" + content[-KEPT_LOG:])


def all_stacks(mark: str, folder: Path) -> str:
    """Asks every Python process of the stage for the stacks of its threads."""
    living = dict(processes_of(mark))
    for pid in living:
        if (folder / str(pid)).exists():  # other processes have no handler, and would end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    time.sleep(min(STACKS_S, 1 + 0.1 * len(living)))
    return "\n".join(
        f"process {pid}: {_stacks_of(folder / str(pid), command)}" for pid, command in living.items()
    )


def _stacks_of(file: Path, command: str) -> str:
    return file.read_text(errors="replace") if file.exists() else f"not Python: {command}"


def end_all(process: subprocess.Popen, mark: str) -> None:
    """Kills the stage's processes until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # no signal reaches a process inside of a driver that hangs
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STACKS_S)
    deadline = time.monotonic() + STACKS_S
    while (left := dict(processes_of(mark))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def processes_of(mark: str) -> Iterator[tuple[int, str]]:
    """Yields pid and command of each living process that inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(folder.name), command.decode(errors="replace")[:300]
        except OSError:  # the process ended, or belongs to another user
            continue


def read_result(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
