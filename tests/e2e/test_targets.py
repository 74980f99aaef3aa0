"""Figures of long runs and of resumes: memory that does not grow, and a start that a checkpoint does not
slow down. `make chaos` takes more steps."""

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from disturbed import Job, Started
from judged_answers import TaskFiles

STEPS = int(os.environ.get("CHAOS_STEPS", 300))
"""Steps of the long run. `make chaos` sets them by an environment variable."""
LOOKS = 20
"""Number of times that the processes of the long run are measured, in its second half."""
GROWTH, NOISE = 1.0, 8.0
"""MB that a process may grow in 100 steps, and MB by which an allocator's memory varies."""
SMALL_STACK = "--rollout.engine transformers --train.backend torch "

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_engines")]


class Size(NamedTuple):
    """Resources of a process at one moment."""

    memory: float
    """Resident memory, MB."""
    files: int
    threads: int


def sizes_of(started: Started) -> dict[str, Size]:
    """Returns the size of the run's own process and of its actors, by name and pid."""
    started.look()
    found = {}
    for pid, process in started.family.items():
        try:
            title = " ".join(process.cmdline())
            if pid == started.pid or title.startswith("ray::"):
                # a busy actor's title is ray::Class.method
                name = "driver" if pid == started.pid else title.split()[0].partition(".")[0]
                size = Size(process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
                found[f"{name} {pid}"] = size
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.timeout(7200)
def test_a_long_run_does_not_grow(task: TaskFiles, tmp_path: Path, record_property: Callable) -> None:
    """Compares the medians of the first and the last quarter of the measurements, which the second half of
    the run consists of."""
    more = f"{SMALL_STACK} --ckpt.max_num 2"
    job = Job(kind="ppo", task=task, folder=tmp_path, steps=STEPS, more=more)
    started, looks = job.start(), defaultdict[str, list[Size]](list)
    for i in range(LOOKS):
        rows = STEPS // 2 + i * (STEPS // 2) // LOOKS
        assert started.wait(lambda rows=rows: len(job.rows()) >= rows, limit=1800) is None, job.text()[-3000:]
        for name, size in sizes_of(started).items():
            looks[name].append(size)
    assert started.wait(limit=1800) == 0, job.text()[-3000:]
    whole = {name: found for name, found in looks.items() if len(found) == LOOKS}
    assert {"ray::PolicyWorker", "ray::EngineActor"} <= {name.split()[0] for name in whole}
    quarter, grown = LOOKS // 4, {}
    for name, found in whole.items():
        early, late = (
            Size(*map(statistics.median, zip(*part, strict=True)))
            for part in (found[:quarter], found[-quarter:])
        )
        grown[name] = late.memory - early.memory
        assert grown[name] <= GROWTH * (STEPS / 2) / 100 + NOISE, (name, found)
        assert late.files <= early.files + 1 and late.threads <= early.threads + 1, (name, found)
    record_property("figure", f"{STEPS} steps, at most {max(grown.values()):.1f} MB more in the second half")


@pytest.mark.timeout(3600)
def test_a_resume_starts_as_soon_as_a_run_from_the_beginning(task, tmp_path, record_property):
    """At most twice the seconds until the first step."""
    seconds = []
    for steps in (2, 4):
        job = Job(kind="ppo", task=task, folder=tmp_path, steps=steps, more=SMALL_STACK)
        assert job.start().wait(limit=1800) == 0, job.text()[-3000:]
        seconds.append(json.loads(job.rows()[steps - 2])["start/total"])
    cold, resumed = seconds
    record_property("figure", f"{cold:.1f} s from the beginning, {resumed:.1f} s from a checkpoint")
    assert len(job.rows()) == 4 and resumed <= 2 * cold
