"""The watch on all processes of a run, and on Ray's head.

A thread of each process writes its counters to Ray's key-value store every BEAT seconds, and its stacks when
the driver requests them (`start_heartbeat`). Calls to an actor would not do, because it may be busy for
hours. A thread of the driver reads the counters (`Watchdog`): it reports a process that does not answer, or
that has work but makes no progress, and gives it up after its limit. An engine is then replaced, a rank ends
the run. A process that makes progress is never given up, however long its work takes. While models load, no
counter grows: any process that computes, reads or writes is then progress of all, which wait for each other.

The same thread requests the end of the run, as SIGTERM does, when Ray drains a node of the run, as it does
before a spot machine is taken away.

Another thread of each process notices the death of Ray's head, the process gcs_server (`guard`). Without it
the cluster makes no progress, but Ray ends its processes only after a minute, and engines later.
"""

import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import internal_kv

from openrlhf.cluster.layout import ENGINES
from openrlhf.errors import first_line, notify
from openrlhf.observability.run_folder import RunFolder

BEAT = 5.0
"""Seconds between two beats, or two polls of the head's port; timeout of one poll."""

NOTICE = 20.0
"""Seconds without an answer after which a line is printed. Without progress it is at least a third of the
limit."""

IDLE = 0.02 * BEAT
"""Largest work between two beats of a process that only waits, see `_work`. Ray's own threads use less."""

STACKS_WAIT = 4 * BEAT
"""Maximum time in seconds for processes to write their stacks."""

STACKS_WANTED = "stacks wanted"

HEAD_LIMIT = 15.0
"""Seconds for which no process listens at the head's port until the driver takes the head for dead. Other
processes wait for two polls more, so that the driver, which tells the cause, ends before."""

Progress = tuple[int, bool]
"""A counter that grows with the work of a process, and True if the process has work."""
Queue = tuple[int, int]
"""Number of requests that an engine answers, and of those that wait."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The counters of a process at one moment."""

    number: int
    progress: int
    is_busy: bool
    pid: int
    host: str
    queue: Queue | None = None
    """None for a process that is no engine."""
    node: str = ""
    """Ray's id of the process's node."""
    work: float = 0.0
    """See `_work`; 0 once a counter has grown."""


def start_heartbeat(
    progress: Callable[[], Progress], queue: Callable[[], Queue | None] = lambda: None
) -> None:
    """Starts the threads of this actor's process. Also ends the process when Ray's head is dead, because Ray
    would wait a minute for the head, and then for child processes."""
    guard(lambda address: os.kill(os.getpid(), signal.SIGKILL), limit=HEAD_LIMIT + 2 * BEAT)
    arguments = Board(), ray.get_runtime_context().get_actor_id(), progress, queue
    threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True).start()


def _beat(
    board: "Board", actor: str, progress: Callable[[], Progress], queue: Callable[[], Queue | None]
) -> None:
    number, has_written, node = 0, False, ray.get_runtime_context().get_node_id()
    while True:
        number += 1
        counter, is_busy = progress()
        work = 0.0 if counter else _work()
        beat = Beat(number, counter, is_busy, os.getpid(), platform.node(), queue(), node, work)
        with suppress(RayError):  # the store may be gone for a while, or for good; then Ray ends this process
            board.put(f"beat/{actor}", json.dumps(asdict(beat)))
            if not has_written and board.get(STACKS_WANTED) is not None:
                board.put(f"stacks/{actor}", stacks())
                has_written = True
        time.sleep(BEAT)


def _work() -> float:
    """Returns CPU seconds of this process and its children, plus a second for each 64 MiB that they read,
    also by mapping a file, or write, as a download does."""
    total, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error, AttributeError):  # it has just ended; no system but Linux counts bytes
            total += sum(process.cpu_times()[:2])
            count = process.io_counters()
            total += (count.read_bytes + count.read_chars + count.write_chars) / 2**26
    return total


class Board:
    """The entries of this run in Ray's key-value store. Its methods never start Ray again after a
    shutdown."""

    def __init__(self) -> None:
        self.prefix = f"openrlhf/{ray.get_runtime_context().get_job_id()}/"

    def put(self, key: str, text: str) -> None:
        internal_kv._internal_kv_put(self.prefix + key, text, overwrite=True)

    def get(self, key: str) -> str | None:
        found = internal_kv._internal_kv_get(self.prefix + key)
        return None if found is None else found.decode()

    def read_beat(self, actor: str) -> Beat | None:
        """Returns the last beat of an actor's process; None before the first."""
        text = self.get(f"beat/{actor}")
        return None if text is None else Beat(**json.loads(text))

    def ask_for_stacks(self) -> None:
        """Requests that every process writes its stacks at its next beat."""
        self.put(STACKS_WANTED, "1")

    def read_stacks(self, actor: str) -> str | None:
        return self.get(f"stacks/{actor}")

    def read_draining(self) -> dict[str, int]:
        """Returns the ids of the nodes that Ray drains -> the time of their end, in ms since 1970; 0 if none
        is set."""
        return ray._private.state.state.get_draining_nodes()

    def clear(self) -> None:
        """Removes all entries of this run's processes."""
        internal_kv._internal_kv_del(self.prefix, del_by_prefix=True)


def stacks() -> str:
    """Returns the stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@dataclass(slots=True)
class _Seen:
    """The last signs of life of a process, by the clock of this process."""

    answered: float
    advanced: float
    number: int = 0
    progress: int = 0
    work: float = 0.0
    is_noted: bool = False
    """True if a line about the process was printed."""
    last: Beat | None = None


class Watchdog:
    """A thread that reads the beats of all processes every BEAT seconds."""

    def __init__(
        self,
        processes: Callable[[], Mapping[str, Sequence[ActorHandle | None]]],
        limits: Callable[[str], float],
        give_up: Callable[[str, int, ActorHandle, str], None],
        folder: str,
        board: Board,
        *,
        needs_progress: bool = True,
    ) -> None:
        """`processes`: returns role -> processes, None for a process that is not watched. `limits`: role ->
        seconds without an answer or progress after which a process is given up. `give_up`: called with the
        role of such a process, its index in the role, the process and the reason. `folder`: folder to which
        the stacks of all processes are written. `needs_progress`: False while processes load models: then
        work of any is progress of all."""
        self._processes, self._limits, self._give_up = processes, limits, give_up
        self._needs_progress = needs_progress
        self._folder, self._board = Path(folder), board
        self._seen: dict[str, _Seen] = {}
        self._worked = 0.0
        self._is_ending = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Must be called before Ray shuts down."""
        self._closed.set()
        self._thread.join(timeout=STACKS_WAIT)

    def _run(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self.look()
            except RayError as error:  # the store may be gone for a while
                notify(f"the processes of the run cannot be watched: {first_line(error)}")

    def look(self) -> None:
        """Reads all beats once, reports or gives up processes without progress, writes the queues of engines,
        and ends the run if a node is drained."""
        processes = self._processes()
        for role, members in processes.items():
            for index, member in enumerate(members):
                if member is not None and (reason := self._silence(role, index, member)):
                    self._give_up(role, index, member, reason)
        self._write_queues(processes.get(ENGINES, ()))
        if not self._is_ending and (host := self._drained_host()):
            self._is_ending = True
            notify(f"Ray drains {host}: the run ends as after SIGTERM")
            os.kill(os.getpid(), signal.SIGTERM)

    def _drained_host(self) -> str:
        """Returns a host of the run that Ray drains, with the time of its end; empty if there is none."""
        ends = self._board.read_draining()
        for beat in (seen.last for seen in self._seen.values()):
            if beat is not None and beat.node in ends:
                end = datetime.fromtimestamp(ends[beat.node] / 1000).strftime(" until %H:%M:%S")
                return beat.host + (end if ends[beat.node] else "")
        return ""

    def _write_queues(self, engines: Sequence[ActorHandle | None]) -> None:
        """Writes the queue of each engine to the run folder, for `openrlhf watch`."""
        if not engines:
            return
        seen = [None if e is None else self._seen.get(e._actor_id.hex()) for e in engines]
        queues = [s.last.queue if s is not None and s.last is not None else None for s in seen]
        with suppress(OSError):  # a full disk, of which the run's own files tell
            RunFolder(self._folder).write_queues(queues)

    def _silence(self, role: str, index: int, member: ActorHandle) -> str:
        """Returns the reason to give up a process; empty if there is none."""
        now, actor = time.monotonic(), member._actor_id.hex()
        seen = self._seen.setdefault(actor, _Seen(now, now))
        beat = self._board.read_beat(actor)
        if beat is not None and beat.number != seen.number:
            seen.answered, seen.number, seen.last = now, beat.number, beat
            if beat.progress != seen.progress or not beat.is_busy:
                seen.advanced, seen.progress = now, beat.progress
            if abs(beat.work - seen.work) > IDLE:
                self._worked = now
            seen.work = beat.work
        limit, name = self._limits(role), name_process(role, index, seen.last)
        since, notice, text = now - seen.answered, min(NOTICE, limit), f"{name} has not answered"
        if seen.last is None:  # imports alone may take longer than NOTICE
            notice, text = max(notice, limit / 3), f"{name} has not started"
        elif since < notice:
            advanced = seen.advanced if self._needs_progress else max(seen.advanced, self._worked)
            since, notice = now - advanced, max(notice, limit / 3)
            text = f"{name} has work but made no progress"
        if since < notice:
            if seen.is_noted:
                notify(f"{name} makes progress again")
            seen.is_noted = False
            return ""
        text += f" for {since:.0f} s"
        if not seen.is_noted:
            notify(f"{text}; it is given up after {limit:.0f} s")
        seen.is_noted = True
        if since < limit:
            return ""
        del self._seen[actor]
        return text

    def write_stacks(self) -> Path:
        """Writes the stacks of all processes to `stacks.txt` in the folder, and returns the file. Waits for
        processes that still answer, at most STACKS_WAIT seconds."""
        self._board.ask_for_stacks()
        named = {
            member._actor_id.hex(): name_process(role, index, None)
            for role, members in self._processes().items()
            for index, member in enumerate(members)
            if member is not None
        }
        deadline = time.monotonic() + STACKS_WAIT
        found: dict[str, str] = {}
        while len(found) < len(named) and time.monotonic() < deadline:
            if self._closed.wait(1):
                break
            found |= {a: text for a in named.keys() - found.keys() if (text := self._board.read_stacks(a))}
        texts = [f"== {named[a]}\n{found.get(a, 'it does not answer')}" for a in named]
        path = self._folder / "stacks.txt"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("\n\n".join([f"== the driver\n{stacks()}", *texts]), encoding="utf-8")
        return path


def name_process(role: str, index: int, beat: Beat | None) -> str:
    """Returns the name of a process for messages."""
    name = f"engine {index}" if role == ENGINES else f"rank {index} of {role}"
    return name if beat is None else f"{name} (process {beat.pid} on {beat.host})"


def guard(
    end: Callable[[str], object], ended: threading.Event | None = None, *, limit: float = HEAD_LIMIT
) -> None:
    """Starts a thread that calls `end` with the head's address once the head is dead. `ended`: event that
    ends the thread; None: it runs as long as the process."""
    arguments = ray.get_runtime_context().gcs_address, end, ended or threading.Event(), limit
    threading.Thread(target=_guard, args=arguments, name="head", daemon=True).start()


def _guard(address: str, end: Callable[[str], object], ended: threading.Event, limit: float) -> None:
    last = time.monotonic()
    while not ended.wait(BEAT):
        if not is_refused(address):
            last = time.monotonic()
        elif time.monotonic() - last >= limit and not ended.is_set():
            end(address)
            return


def is_refused(address: str) -> bool:
    """Returns True if the machine of this address (host:port) answers that no process listens there. If
    nothing answers, the head may be busy or the network down, and Ray decides."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=BEAT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
