"""Finds the causes of a run that makes no progress, or that ended early: the process that the others wait
for, by the stacks of py-spy or stacks.txt."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil

from openrlhf.tools.doctor.record import Finding, RunRecord

STACKS = "stacks.txt"
PATIENCE = 120.0
"""Minimum seconds since the last step of a run that counts as stalled."""
SLOW = 4.0
"""Minimum time since the last step of a stalled run, as a multiple of the median time of a step."""
MOST_LINES = 24
"""Maximum number of lines of evidence about processes."""


PY_SPY_TIMEOUT = 20.0
"""Maximum seconds that py-spy may take to read the stacks of one process."""


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of the thread that does a process's work."""

    process: str
    """Name of the process, such as "rank 1 of policy"."""
    frames: tuple[Frame, ...]
    """Innermost first; empty if the process did not answer."""


COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|barrier|gather|scatter)\w*"
)
_IDLE = ("cluster/watchdog.py", "observability/waits.py", "cluster/watch.py", "observability/progress.py")
"""Files of threads that only watch; the last two are those of older runs."""
_PLACES = (
    ("rewards/", "computes or awaits rewards"),
    ("agents/", "runs an agent"),
    ("environments/", "runs an environment"),
    ("cluster/pending.py", "waits for calls to other processes"),
    ("weight_sync/", "sends or receives weights"),
    ("backends/vllm/", "samples"),
    ("backends/transformers/", "samples"),
    ("checkpoint/writer.py", "writes a checkpoint"),
    ("observability/journal.py", "writes rollouts"),
    ("/vllm/", "samples"),
)
"""(part of a file's path, description of a process with a frame in it), the most specific first."""


def doing(stack: Stack) -> str:
    """Describes what a process does, by its innermost frame in a known place."""
    if not stack.frames:
        return "does not answer"
    if operation := collective(stack):
        return f"waits for the other ranks in {operation}"
    for frame in stack.frames:
        if text := next((text for part, text in _PLACES if part in frame.file), ""):
            return f"{text}, in {frame}"
    own = next((frame for frame in stack.frames if "openrlhf" in frame.file), stack.frames[0])
    return f"is in {own}"


def collective(stack: Stack) -> str:
    """Returns the collective operation that the process waits in; "" if it waits in none."""
    for frame in stack.frames:
        is_wait = any(part in frame.file for part in ("distributed", "deepspeed", "openrlhf/mesh.py"))
        if is_wait and COLLECTIVE.fullmatch(frame.function.lstrip("_")):
            return frame.function
    return ""


def read_stacks(path: Path) -> list[Stack]:
    """Reads stacks.txt of a run folder: for each process its threads."""
    found = []
    for part in re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        process, _, text = part.partition("\n")
        threads = []
        for thread in re.split(r"^thread .*:$", text, flags=re.MULTILINE)[1:]:
            lines = re.findall(r'File "(.+?)", line (\d+), in (.+)', thread)  # by traceback.format_stack
            threads.append(tuple(Frame(name, file, int(line)) for file, line, name in reversed(lines)))
        found.append(Stack(process, _working(threads)))
    return found


def dump_stacks(process: psutil.Process) -> list[Stack]:
    """Returns the stacks of a running run: of its process, its Python descendants and its Ray actors."""
    members = [process, *process.children(recursive=True)]
    known = {member.pid for member in members}
    members += [
        found for found in psutil.process_iter() if found.pid not in known and _belongs_to(found, process)
    ]
    stacks = [_dump(member, is_driver=member.pid == process.pid) for member in members if _is_python(member)]
    return [stack for stack in stacks if stack is not None]


def _belongs_to(found: psutil.Process, run: psutil.Process) -> bool:
    """Returns True for a Ray actor that started after the run in the same folder: probably the run's."""
    try:
        is_actor = bool(found.cmdline()) and found.cmdline()[0].startswith("ray::")
        return is_actor and found.create_time() > run.create_time() and found.cwd() == run.cwd()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in Path(process.exe()).name
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _dump(process: psutil.Process, *, is_driver: bool) -> Stack | None:
    """Reads a stack by py-spy: no frames if it cannot be read, None if the process has ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    name = "the driver" if is_driver else " ".join(words[:1] if words[0].startswith("ray::") else words)[:60]
    name = f"{name} (process {process.pid})"
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return Stack(f"{name}: py-spy is not installed (pip install py-spy)", ())
    command = [program, "dump", "--json", "--pid", str(process.pid)]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT)
    except subprocess.TimeoutExpired:
        return Stack(name, ())
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [""]
        return Stack(f"{name}: {lines[-1]}", ()) if psutil.pid_exists(process.pid) else None
    threads = [
        tuple(Frame(frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"])
        for thread in json.loads(answer.stdout)
    ]
    return Stack(name, _working(threads))


def _working(threads: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """Returns the frames of the thread that does the work of a process: the longest with code of openrlhf
    that does more than watch, else the longest of all."""
    own = [thread for thread in threads if any("openrlhf" in frame.file for frame in thread)]
    own = [thread for thread in own if not any(part in f.file for f in thread for part in _IDLE)]
    return max(own or threads, key=len, default=())


def waiting(stacks: Sequence[Stack]) -> Iterator[str]:
    """Yields which ranks wait in a collective operation for which others, then what each process does."""
    ranks = [
        stack for stack in stacks if "rank" in stack.process.lower() or "policy" in stack.process.lower()
    ]
    inside = {stack.process: operation for stack in ranks if (operation := collective(stack))}
    late = [stack for stack in ranks if stack.process not in inside]
    if inside and late:
        yield (
            f"{', '.join(inside)} wait{'s' * (len(inside) == 1)} in {', '.join(sorted({*inside.values()}))} "
            f"for {', '.join(stack.process for stack in late)}"
        )
    for stack in stacks:
        yield f"{stack.process} {doing(stack)}"


def stall_findings(run: RunRecord) -> Iterator[Finding]:
    path = run.path / STACKS
    if run.process is not None:
        yield from _living(run)
    elif run.wrote_last(STACKS):
        stacks = read_stacks(path)
        when = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        head = f"{STACKS} of {when:%Y-%m-%d %H:%M:%S} UTC, after step {run.last_step}"
        yield _stall("the run ended because a process made no progress", 0.9, head, stacks)
    elif run.owner is not None and run.owner.is_here and not run.wrote_last("report.html"):
        yield _killed(run)


def _living(run: RunRecord) -> Iterator[Finding]:
    metrics = run.metrics_path
    assert run.owner is not None
    assert run.process is not None
    # a resumed run has metrics of an earlier start until it has its models
    began = run.owner.since.timestamp()
    since = max(began, metrics.stat().st_mtime) if metrics.exists() else began
    seconds = run.series("timing/step_total").values
    usual = float(np.median(seconds)) if len(seconds) else 0.0
    waited = time.time() - since
    if waited < max(PATIENCE, SLOW * usual):
        return
    head = f"no step ended for {waited:.0f} s, since step {run.last_step}; the median step took {usual:.3g} s"
    yield _stall("the run makes no progress", 0.9 if usual else 0.5, head, dump_stacks(run.process))


def _stall(title: str, score: float, head: str, stacks: list[Stack]) -> Finding:
    lines = list(waiting(stacks))
    late = [stack for stack in stacks if stack.frames and not collective(stack)]
    if any(collective(stack) for stack in stacks):
        remedy = "look at the process that the others wait for. --train.rank_timeout ends a run that hangs"
    elif any("rewards/" in frame.file for stack in late for frame in stack.frames):
        remedy = "the reward is slow: lower --reward.timeout, or raise --reward.num_workers"
    elif any(not stack.frames for stack in stacks):
        remedy = "look at the log and the machine of the process that does not answer"
    else:
        remedy = (
            "look at the process that works. --rollout.engine_timeout and --train.rank_timeout end a run "
            "that hangs"
        )
    return Finding(
        cause="stall",
        title=title,
        score=score,
        evidence=(head, *lines[:MOST_LINES]),
        remedy=f"{remedy}. --ckpt.load_enable resumes from the last checkpoint",
    )


def _killed(run: RunRecord) -> Finding:
    assert run.owner is not None
    peaks = [run.series(name) for name in run.names("memory/")]
    evidence = [
        f"process {run.owner.pid} on {run.owner.host} has ended without writing report.html",
        f"the last step is {run.last_step}",
    ]
    if peaks:
        most = max(peaks, key=lambda series: series.values.max(initial=0))
        evidence.append(f"largest memory: {most.name} {most.values.max(initial=0):.3g} GiB")
    return Finding(
        cause="killed",
        title="the run was killed",
        score=0.7,
        evidence=tuple(evidence),
        remedy="look for the out-of-memory killer in `dmesg`, and at the memory and time limits of the job; "
        "--ckpt.load_enable resumes from the last checkpoint",
    )
