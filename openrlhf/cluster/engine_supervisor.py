"""Replaces rollout engines that died.

A dead engine's prompts go back to the front of the dispatcher's queue, and a new process starts in its
place. The new engine serves once the pool has sent it the current weights and compared its log-probs of the
probe. An engine that dies more than MAX_RESTARTS times in WINDOW seconds ends the run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError

from openrlhf.cluster.pending import Handle, results
from openrlhf.cluster.process_exits import describe_cause, is_death
from openrlhf.errors import ErrorCode, RunError, notify

MAX_RESTARTS, WINDOW = 5, 600.0
"""Largest number of restarts of one engine within that many seconds."""

START_TIMEOUT = 1800.0
"""Seconds in which the process of a new engine must load its model."""


class State(Enum):
    """State of an engine's process."""

    SERVING = "serving"
    WAITING = "waiting"
    """The process is dead, and its successor is not due yet."""
    STARTING = "starting"
    """The process loads its model."""
    LOADED = "loaded"
    """The process waits for its weights, or receives them."""


@dataclass(slots=True)
class _Place:
    """One engine's place, which several processes fill one after the other."""

    state: State = State.SERVING
    started: ray.ObjectRef | None = None
    """Pending start of the process."""
    deaths: deque[float] = field(default_factory=deque)
    """Times of the deaths within WINDOW, time.monotonic()."""
    due: float = 0.0
    """Time of the next start, or time by which the process must have started."""


class EngineSupervisor:
    """Keeps track of a run's engines, and restarts dead ones. `report` may be called in any thread."""

    def __init__(
        self,
        count: int,
        *,
        create: Callable[[int], Handle],
        start: Callable[[Handle], ray.ObjectRef],
        lose: Callable[[int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`create`: creates the process of the engine with this number. `start`: begins to load its model.
        `lose`: gives an engine's prompts to others. `fail`: ends the run with an error."""
        self._create, self._start, self._lose, self._fail = create, start, lose, fail
        self.members = [create(number) for number in range(count)]
        """The processes, by the engine's number."""
        self._places = [_Place() for _ in range(count)]
        self._lock = threading.Lock()
        self.failure: RunError | None = None
        """The error that ends the run; None while every engine can be replaced."""
        self._num_restarts = 0

    @property
    def serving(self) -> list[int]:
        """Numbers of the engines that can take requests."""
        return [i for i, place in enumerate(self._places) if place.state is State.SERVING]

    @property
    def all_serve(self) -> bool:
        return len(self.serving) == len(self.members)

    @property
    def loaded(self) -> list[int]:
        """Numbers of the engines that serve or wait for their first weights."""
        ready = State.SERVING, State.LOADED
        return [i for i, place in enumerate(self._places) if place.state in ready]

    def is_dead(self, number: int) -> bool:
        """Tells whether an engine is dead and its successor has not begun to start."""
        return self._places[number].state is State.WAITING

    def call(self, method: str, *arguments: Any) -> "Answers":
        """Calls a method of the engines that serve."""
        called = {i: self.members[i] for i in self.serving}
        return Answers(
            self, {getattr(member, method).remote(*arguments): (i, member) for i, member in called.items()}
        )

    def report(self, number: int, member: Handle, error: BaseException) -> bool:
        """Records an engine's death, once per process, and plans its replacement. Returns False if the error
        is no death. `member`: the process that raised the error."""
        if not is_death(error):
            return False
        self.give_up(number, member, describe_cause(error))
        return True

    def give_up(self, number: int, member: Handle, reason: str) -> None:
        """Plans the replacement of an engine. `reason`: the fault of its process `member`."""
        with self._lock:
            place = self._places[number]
            if self.members[number] is not member or place.state is State.WAITING or self.failure:
                return
            place.state, place.started = State.WAITING, None
            self._plan_restart(number, place, reason)
        if self.failure:
            self._fail(self.failure)
        else:
            self._lose(number)

    def _plan_restart(self, number: int, place: _Place, reason: str) -> None:
        now = time.monotonic()
        while place.deaths and now - place.deaths[0] > WINDOW:
            place.deaths.popleft()
        place.deaths.append(now)
        count = len(place.deaths)
        if count > MAX_RESTARTS:
            text = (
                f"engine {number} died {count} times in {WINDOW / 60:.0f} minutes, the last time:\n{reason}"
            )
            self.failure = RunError(ErrorCode.ENGINE_FAILED, text)
            return
        place.due = now + (0 if count == 1 else 2.0 ** (count - 1))
        again = f"restart {count} of at most {MAX_RESTARTS} in {WINDOW / 60:.0f} minutes"
        notify(f"engine {number} is replaced, and its prompts are sampled again ({again}): {reason}")

    def begin_restarts(self) -> None:
        """Starts the successors that are due. Returns at once. Raises the error that ends the run."""
        if self.failure:
            raise self.failure
        for number, place in enumerate(self._places):
            if place.state is State.WAITING and time.monotonic() >= place.due:
                ray.kill(self.members[number])
                self.members[number] = member = self._create(number)
                place.state, place.started = State.STARTING, self._start(member)
                place.due = time.monotonic() + START_TIMEOUT
                self._num_restarts += 1

    def started(self) -> list[int]:
        """Returns the numbers of the engines that have loaded their model and wait for weights."""
        for number, place in enumerate(self._places):
            if place.started is not None and ray.wait([place.started], timeout=0)[0]:
                try:
                    ray.get(place.started, timeout=0)
                    place.state, place.started = State.LOADED, None
                except RayError as error:
                    self.give_up(number, self.members[number], describe_cause(error))
            elif place.started is not None and time.monotonic() > place.due:
                self.give_up(number, self.members[number], f"it did not start in {START_TIMEOUT:.0f} s")
        return [i for i, place in enumerate(self._places) if place.state is State.LOADED]

    def serve(self, number: int) -> bool:
        """Marks a new engine as serving. Returns False if it died meanwhile."""
        with self._lock:
            place = self._places[number]
            if place.state is State.WAITING:
                return False
            place.state = State.SERVING
        notify(f"engine {number} serves again, {time.monotonic() - place.deaths[-1]:.0f} s after its death")
        return True

    def take_restarts(self) -> int:
        """Returns the number of restarts since the last call."""
        count, self._num_restarts = self._num_restarts, 0
        return count


class Answers:
    """Pending answers of several engines. If an engine dies, its death is reported and its answer is
    omitted."""

    def __init__(self, supervisor: EngineSupervisor, refs: dict[ray.ObjectRef, tuple[int, Handle]]) -> None:
        self.supervisor, self.refs = supervisor, refs

    def result(self) -> dict[int, Any]:
        """Returns the answers by the engine's number. Raises errors that are no deaths."""
        found = {}
        for ref, (number, member) in self.refs.items():
            try:
                (found[number],) = results([ref])
            except RayError as error:
                if not self.supervisor.report(number, member, error):
                    raise
        return found
