"""Faults at named points of a run, which tests inject to see that the run recovers.

    OPENRLHF_FAULT="save.before_rename:kill@3" openrlhf sft ...

Without the variable nothing happens. It holds a comma list of POINT:KIND[=VALUE][@VISIT][#RANK]. The fault
occurs at the VISIT-th time (from 1, the default) that a process comes to POINT, on all ranks or on RANK.
"""

import errno
import os
import re
import signal
import time
from collections import Counter
from functools import cache
from typing import NamedTuple

from openrlhf.errors import ErrorCode, UsageError

VARIABLE = "OPENRLHF_FAULT"

POINTS = {
    "step.loss": "an optimizer step: `nan` makes the loss of its first row NaN",
    "step.weights": "after an optimizer step: `nan` makes a weight of this rank NaN",
    "rows.log_probs": "after a forward pass without gradient: `nan` makes the first number NaN",
    "save.file": "before a rank writes a file of a checkpoint",
    "save.before_rename": "all files of a checkpoint are written and listed; none has its final name",
    "save.between_models": "the critic's checkpoint has its name, the policy's does not",
    "save.after_rename": "a checkpoint has its name; `latest` does not name it yet",
    "save.rotate": "before an old checkpoint is removed",
    "export.before_move": "an exported model is written, and its files are still in a temporary folder",
    "rank.load": "before a rank of policy or critic loads its model",
    "sync.send": "before a rank sends weights to the engines",
    "sync.load": "in a worker of a vLLM engine, before it loads a bucket of weights",
    "reward.call": "in the process of a reward function, before a call of it",
    "tracker.log": "before a tracker receives the metrics of a step",
}
"""Maps each point to its place in a run."""
KINDS = {
    "kill": "ends the process by SIGKILL",
    "stop": "stops the process by SIGSTOP, so that it hangs",
    "raise": "raises RuntimeError",
    "enospc": "raises the OSError of a full disk",
    "sleep": "waits for VALUE seconds",
    "nan": "makes a number NaN, at the points that say so",
}

_FAULT = re.compile(
    r"(?P<point>[a-z_.]+):(?P<kind>[a-z]+)(=(?P<value>\d+(\.\d+)?))?(@(?P<visit>\d+))?(#(?P<rank>\d+))?"
)
_visits: Counter[str] = Counter()


class Fault(NamedTuple):
    """A fault that OPENRLHF_FAULT asks for."""

    point: str
    kind: str
    value: float
    visit: int
    rank: str | None
    """None: every rank."""

    @property
    def is_now(self) -> bool:
        """True at the visit of this process that has the fault."""
        return _visits[self.point] == self.visit and self.rank in (None, os.environ.get("RANK", "0"))


def fault(point: str) -> bool:
    """Triggers the faults that OPENRLHF_FAULT asks for at this point. Returns True if the caller must make a
    number NaN."""
    if VARIABLE not in os.environ:
        return False
    assert point in POINTS
    _visits[point] += 1
    due = [each for each in faults(os.environ[VARIABLE]) if each.point == point and each.is_now]
    for each in due:
        _occur(each)
    return any(each.kind == "nan" for each in due)


@cache
def faults(text: str) -> tuple[Fault, ...]:
    """Parses the value of OPENRLHF_FAULT. Raises UsageError for an unknown point or kind."""
    return tuple(_parsed(part.strip()) for part in text.split(",") if part.strip())


def _parsed(part: str) -> Fault:
    match = _FAULT.fullmatch(part)
    is_known = match is not None and match["point"] in POINTS and match["kind"] in KINDS
    if match is None or not is_known or (match["kind"] == "nan" and "`nan`" not in POINTS[match["point"]]):
        numbers = ", ".join(point for point in POINTS if "`nan`" in POINTS[point])
        text = (
            "not a fault.\nThe form is POINT:KIND[=VALUE][@VISIT][#RANK]; points: "
            f"{', '.join(POINTS)}; kinds: {', '.join(KINDS)} (nan only at {numbers})"
        )
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=VARIABLE, value=part)
    return Fault(
        match["point"], match["kind"], float(match["value"] or 0), int(match["visit"] or 1), match["rank"]
    )


def _occur(each: Fault) -> None:
    if each.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif each.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif each.kind == "raise":
        raise RuntimeError(f"{VARIABLE} raised this error at {each.point}")
    elif each.kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), each.point)
    elif each.kind == "sleep":
        time.sleep(each.value)
