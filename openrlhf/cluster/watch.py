"""Watches the processes of a run. Reports a process that does not answer, or that has work but makes no
progress, and gives it up after its limit: an engine is replaced, a rank ends the run. A process that makes
progress is never given up, however long its work takes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ray.actor import ActorHandle
from ray.exceptions import RayError

from openrlhf.cluster.layout import ENGINES
from openrlhf.cluster.pulse import BEAT, Beat, Board, stacks
from openrlhf.errors import first_line, notify
from openrlhf.observability.run_folder import RunFolder

NOTICE = 20.0
"""Seconds without an answer after which a line is printed. Without progress it is at least a third of the
limit."""

STACKS_WAIT = 4 * BEAT
"""Maximum time in seconds for processes to write their stacks."""


@dataclass(slots=True)
class _Seen:
    """The last signs of life of a process, by the clock of this process."""

    answered: float
    advanced: float
    number: int = 0
    progress: int = 0
    is_noted: bool = False
    """True if a line about the process was printed."""
    last: Beat | None = None


class Watch:
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
        the stacks of all processes are written. `needs_progress`: False if an answer suffices, as from a
        process that loads a model, during which no counter grows."""
        self._processes, self._limits, self._give_up = processes, limits, give_up
        self._needs_progress = needs_progress
        self._folder, self._board = Path(folder), board
        self._seen: dict[str, _Seen] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

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
        """Reads all beats once, reports or gives up processes without progress, and writes the queues of
        engines."""
        processes = self._processes()
        for role, members in processes.items():
            for index, member in enumerate(members):
                if member is not None and (reason := self._silence(role, index, member)):
                    self._give_up(role, index, member, reason)
        self._write_queues(processes.get(ENGINES, ()))

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
        limit, name = self._limits(role), name_of(role, index, seen.last)
        since, notice, text = now - seen.answered, min(NOTICE, limit), f"{name} has not answered"
        if seen.last is None:  # imports alone may take longer than NOTICE
            notice, text = max(notice, limit / 3), f"{name} has not started"
        elif since < notice and self._needs_progress:
            since, notice = now - seen.advanced, max(notice, limit / 3)
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
            member._actor_id.hex(): name_of(role, index, None)
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


def name_of(role: str, index: int, beat: Beat | None) -> str:
    """Returns the name of a process for messages."""
    name = f"engine {index}" if role == ENGINES else f"rank {index} of {role}"
    return name if beat is None else f"{name} (process {beat.pid} on {beat.host})"
