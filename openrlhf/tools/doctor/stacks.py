"""Reads the stacks of a run's processes from py-spy or stacks.txt, and describes what each process does."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

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
_IDLE = ("cluster/watchdog.py", "cluster/watch.py", "observability/progress.py")  # watch.py: older runs
"""Files of threads that only watch."""
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
        threads = [_frames(thread) for thread in re.split(r"^thread .*:$", text, flags=re.MULTILINE)[1:]]
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


def _frames(text: str) -> tuple[Frame, ...]:
    """Reads the lines of `traceback.format_stack`."""
    found = re.findall(r'File "(.+?)", line (\d+), in (.+)', text)
    return tuple(Frame(function, file, int(line)) for file, line, function in reversed(found))


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
