"""Finds the causes of a run that makes no progress, or that ended early: the process that the others wait
for."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from openrlhf.tools.doctor.finding import Finding
from openrlhf.tools.doctor.record import RunRecord
from openrlhf.tools.doctor.stacks import Stack, collective, dump_stacks, read_stacks, waiting

PATIENCE = 120.0
"""Minimum seconds since the last step of a run that counts as stalled."""
SLOW = 4.0
"""Minimum time since the last step of a stalled run, as a multiple of the median time of a step."""
MOST_LINES = 24
"""Maximum number of lines of evidence about processes."""


def stall_findings(run: RunRecord) -> Iterator[Finding]:
    path = run.path / "stacks.txt"
    if run.process is not None:
        yield from _living(run)
    elif path.exists():
        stacks = read_stacks(path)
        when = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        head = f"stacks.txt of {when:%Y-%m-%d %H:%M:%S} UTC, after step {run.last_step}"
        yield _stall("the run ended because a process made no progress", 0.9, head, stacks)
    elif run.owner is not None and run.owner.is_here and not (run.path / "report.html").exists():
        yield _killed(run)


def _living(run: RunRecord) -> Iterator[Finding]:
    metrics = run.path / "metrics.jsonl"
    assert run.owner is not None
    assert run.process is not None
    since = metrics.stat().st_mtime if metrics.exists() else run.owner.since.timestamp()
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
        )
        remedy += "that hangs"
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
