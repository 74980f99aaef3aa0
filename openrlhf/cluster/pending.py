"""Pending results of calls to Ray actors: implements `Pending` of backends/base.py."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from openrlhf.errors import notify

ResultT = TypeVar("ResultT")

Handle = Any
"""An actor handle. Ray does not type its methods."""

STALL = 600.0
"""Seconds of a wait after which a line says who waits for whom, again each time they have passed."""

actor_names: dict[str, str] = {}
"""Maps the id of an actor to its name in messages."""


class Answer(NamedTuple):
    """The answer of a call in this process, in place of a reference to a call in another one."""

    value: Any


class Gathered(Generic[ResultT]):
    """Pending calls on several workers, combined into one result."""

    def __init__(self, refs: Sequence[ray.ObjectRef | Answer], combine: Callable[[list], ResultT]) -> None:
        self.refs, self.combine = refs, combine

    def result(self) -> ResultT:
        return self.combine(results(self.refs))


def first(results: list) -> Any:
    """Returns the first result, for calls to which all ranks return the same."""
    return results[0]


def results(refs: Sequence[ray.ObjectRef | Answer]) -> list:
    """Returns the results of calls, or raises the first error of one. A wait for a process that hangs ends
    when watchdog.py kills the process, whose calls then fail. A long wait is reported on stderr."""
    calls: list[Any] = list(refs)
    if all(isinstance(call, Answer) for call in calls):
        return [call.value for call in calls]
    began = time.monotonic()
    while True:
        try:
            return ray.get(calls, timeout=STALL)
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # the call itself timed out
                raise
            _report(calls, time.monotonic() - began)


def _report(refs: list[ray.ObjectRef], seconds: float) -> None:
    _, missing = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    whom = sorted({actor_names.get(ref.task_id().actor_id().hex(), "a task of Ray") for ref in missing})
    caller = next(f for f in reversed(traceback.extract_stack()) if f.filename != __file__)
    place = f"{caller.name} in {caller.filename}:{caller.lineno}"
    text = f"waiting for {seconds:.0f} s for {', '.join(whom)}: {len(missing)} of {len(refs)} calls ({place})"
    notify(text)
