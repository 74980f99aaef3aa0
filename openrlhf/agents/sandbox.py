r"""Sandbox for untrusted Python code: a process without network, secrets or the machine's files.

The result has the code's output and how it ended:

    result = Sandbox(seconds=5).run("print(int(input()) ** 2)", stdin="7")
    result.status, result.stdout  # "ok", "49\n"
"""

import asyncio
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal

from openrlhf.agents import isolation
from openrlhf.errors import ErrorCode, RunError, UsageError

Stopped = Literal["timeout", "output"]
Status = Literal["ok", "error", "killed"] | Stopped


class SandboxUnavailable(RunError):
    """Raised when this machine cannot isolate code; the code is not run."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.UNSUPPORTED, text)
        self.args = (text,)  # pickle creates a copy with this argument


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    status: Status
    """Status of the run. ok: exit code 0. error: another exit code, as after an exception. killed: ended by a
    signal. timeout, output: stopped at this limit."""
    exit_code: int | None
    """Exit code of the code. Negative: the signal that ended it. None: it was stopped at a limit."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """The result as text for a policy: stdout, stderr, and the reason if the code was killed or
        stopped."""
        ending = {
            "killed": f"[killed by signal {-(self.exit_code or 0)}]",
            "timeout": "[stopped: out of time]",
            "output": "[stopped: too much output]",
        }.get(self.status, "")
        parts = (part.rstrip("\n") for part in (self.stdout, self.stderr, ending))
        return "\n".join(filter(None, parts)) or "[no output]"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs code in Linux namespaces of its own: without network, other processes or files other than Python's
    own packages and the system's libraries, as an unprivileged user with a minimal environment. All
    processes and files of a run end with it. The constructor raises SandboxUnavailable if the machine does
    not allow this.

    Each process runs as many sandboxes at a time as it has cores; further runs wait.
    """

    seconds: float = 10.0
    """Wall-clock limit in seconds, from the start of the code."""
    memory: int = 512 << 20
    """Memory limit of each process, in bytes. A run uses at most `processes` times that, plus `disk`."""
    processes: int = 8
    """Limit of processes and threads together."""
    disk: int = 64 << 20
    """Size of the run's folder in bytes: the only writable one, held in memory and deleted with the run."""
    output: int = 1 << 20
    """Limit of stdout and stderr together, in bytes."""
    import_from: tuple[str, ...] = ()
    """Folders of packages that the code may read and import from. If root starts the sandbox, they must be
    readable by all users."""

    def __post_init__(self) -> None:
        if missing := [folder for folder in self.import_from if not os.path.isdir(folder)]:
            text = f"there is no folder {', '.join(missing)}"
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="import_from")
        _check(self)

    def run(self, code: str, stdin: str = "") -> SandboxResult:
        """Runs the code and waits for its result."""
        return self._start(code, stdin).result()  # bounded: `seconds` of the sandbox

    async def run_async(self, code: str, stdin: str = "") -> SandboxResult:
        return await asyncio.wrap_future(self._start(code, stdin))

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program. It has the standard library, no network, and no files but its own.
        """
        return (await self.run_async(code)).text

    def _start(self, code: str, stdin: str) -> Future[SandboxResult]:
        return _threads().submit(_run, self._task(code, stdin), self.seconds, self.output)

    def _task(self, code: str, stdin: str) -> isolation.Task:
        folders = [os.path.abspath(folder) for folder in self.import_from]
        python = os.path.realpath(sys.executable)
        needed = (*SYSTEM, python, f"{sys.base_prefix}/lib", *folders)
        limits = {
            "RLIMIT_AS": self.memory,
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_FSIZE": self.disk,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        return {
            "python": python,
            "code": code,
            "stdin": stdin,
            "environment": ENVIRONMENT | {"PYTHONPATH": ":".join(folders)},
            "visible": {path: os.path.realpath(path) for path in needed if os.path.exists(path)},
            "disk": self.disk,
            "limits": limits,
        }


SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
"""Paths of the shared libraries that programs are linked with."""
ENVIRONMENT = {"HOME": isolation.HOME, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="sandbox")


@cache
def _check(sandbox: Sandbox) -> None:
    """Runs an empty program, once for each set of limits. Raises SandboxUnavailable if it fails."""
    if sys.platform != "linux" or platform.machine() not in isolation.MACHINES:
        raise SandboxUnavailable(
            f"the sandbox does not support {sys.platform} on {platform.machine()}. {REMEDY}"
        )
    result = sandbox.run("")
    if result.status not in ("ok", "timeout"):
        raise SandboxUnavailable(f"Python does not start within {sandbox}: {result.text}")


REMEDY = (
    "The sandbox needs Linux 5.12 or newer (x86_64, aarch64), and a user who may create namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0) or root (docker run "
    "--cap-add SYS_ADMIN --security-opt apparmor=unconfined)."
)


def _run(task: isolation.Task, seconds: float, output: int) -> SandboxResult:
    began = time.monotonic()
    reader, report = os.pipe()
    with open(reader, encoding="utf-8") as reports, tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
        json.dump(task, stdin)
        stdin.seek(0)
        command = [task["python"], "-I", "-S", "-B", isolation.__file__, str(report)]
        with subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[report], env={}
        ) as process:
            os.close(report)
            streams = [stream.fileno() for stream in (reports, process.stdout, process.stderr) if stream]
            try:
                stopped, (report_text, stdout, stderr) = _read(streams, seconds, output)
            finally:
                process.send_signal(signal.SIGTERM)  # no effect on a process that has ended
    exit_code = _exit_code(report_text.splitlines(), stderr)
    return SandboxResult(
        status=stopped or ("ok" if exit_code == 0 else "error" if exit_code > 0 else "killed"),
        exit_code=None if stopped else exit_code,
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - began,
    )


def _read(streams: Sequence[int], seconds: float, limit: int) -> tuple[Stopped | None, list[str]]:
    """Reads the streams to their ends or to a limit, and returns the limit that was reached (None: none) and
    the text of each stream. Time is counted from the first bytes of the first stream, the report."""
    said, stopped, deadline = dict.fromkeys(streams, b""), None, time.monotonic() + START_LIMIT
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not stopped:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fd == streams[0] and not said[key.fd]:
                    deadline = time.monotonic() + seconds
                part = os.read(key.fd, 1 << 16)
                said[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            if sum(map(len, said.values())) > limit:
                stopped = "output"
            elif time.monotonic() > deadline:
                stopped = "timeout"
    return stopped, [text[:limit].decode(errors="replace") for text in said.values()]


START_LIMIT = 60.0
"""Seconds that the start of the code may take on a busy machine."""


def _exit_code(lines: Sequence[str], stderr: str) -> int:
    """Returns the code's exit code from the lines of the report. A report that stops after "started" counts
    as SIGKILL: the code ended the reporting process. Raises SandboxUnavailable if the code did not start."""
    nothing = [] if lines else [f"the isolating program only printed {stderr[-500:]!r}"]
    for problem in nothing + [line.removeprefix("refused ") for line in lines if line.startswith("refused ")]:
        raise SandboxUnavailable(f"{problem}. {REMEDY}")
    return int(lines[1]) if len(lines) > 1 else -signal.SIGKILL
