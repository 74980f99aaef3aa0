"""Runs a module as a job: in child processes on this machine, which are the ranks of the job if there are
several. Reads the end of its log if it fails."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch.distributed import TCPStore

TIMEOUT = 3600.0
"""Seconds after which a job is ended."""
LINES = 12
"""Maximum number of lines of a log that are shown."""
LAUNCHED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
"""Environment variables by which a launcher describes a group of ranks. A job must not inherit those of the
process that starts it."""
PATIENCE = 10.0
"""Seconds that a process has after SIGTERM to end its own child processes."""


def logged_job(words: Sequence[str], log: Path, **options: Any) -> str:
    """Runs `python -m WORDS` with its output in the file `log`. Returns "" if it succeeded, else how it ended
    and the end of its log. `options`: see `run_job`."""
    with log.open("wb") as file:
        try:
            code = run_job(words, file, timeout=TIMEOUT, **options)
        except TimeoutError:
            return f"it was ended after {TIMEOUT:g} s; {_read_end(log)}"
    return f"it ended with code {code}; {_read_end(log)}" if code else ""


def _read_end(log: Path) -> str:
    """Returns the first error of a command and the lines after it; without one the last lines."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    shown = lines[errors[0] : errors[0] + LINES] if errors else lines[-LINES:]
    return "\n".join([f"the end of {log}:", *shown])


def run_job(
    words: Sequence[str],
    output: IO | int,
    *,
    ranks: int = 1,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    timeout: float = float("inf"),
    tick: Callable[[float], None] = lambda seconds: None,
) -> int:
    """Runs `python -m WORDS`. Returns 0 if all ranks succeed, else the exit status of one that failed.
    Several ranks find each other as under torchrun. When one fails, the others are ended. Raises TimeoutError
    after `timeout`.

    Args:
        words: the module and its arguments.
        output: file or descriptor for stdout and stderr of the processes.
        ranks: number of processes.
        environment: environment variables of the processes. Those of a launcher (`LAUNCHED`) are left out.
        folder: working folder; None: that of this process.
        timeout: seconds after which the job is ended.
        tick: function that is called with the seconds since the start, five times a second.
    """
    started = time.monotonic()
    with _processes([sys.executable, "-m", *words], output, ranks, environment, folder) as job:
        while any(process.poll() is None for process in job) and not any(process.poll() for process in job):
            seconds = time.monotonic() - started
            if seconds > timeout:
                raise TimeoutError(f"it took longer than {timeout:g} s")
            tick(seconds)
            time.sleep(0.2)
        return next(filter(None, (process.poll() for process in job)), 0)


@contextmanager
def _processes(
    command: Sequence[str], output: IO | int, ranks: int, environment: Mapping[str, str], folder: Path | None
) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes, each in a separate process group, and kills the remaining ones afterwards."""
    common = {name: value for name, value in environment.items() if name not in LAUNCHED}
    if ranks > 1:
        # As with torchrun, this process has the store by which ranks find each other. If rank 0 opened the
        # port seconds later, another program might have taken it.
        store = _store()
        common = {"OMP_NUM_THREADS": "1"} | common  # torchrun's default
        common |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "job",
        }
    job: list[subprocess.Popen] = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            job.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=common | place,
                    cwd=folder,
                    start_new_session=True,
                )
            )
        yield job
    finally:
        for process in job:
            _end(process)


def _store() -> TCPStore:
    """Returns a store of this process that listens only on loopback."""
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach()
    )


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()  # bounded: SIGKILL has ended it
