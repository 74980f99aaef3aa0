"""Checks that several ranks compute the gradient of one rank, at several ZeRO stages. The ranks are a job on
this machine, and this module is also their program."""

import math
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from openrlhf.api import DEVICE_TYPE, init_distributed, leave_distributed, with_values
from openrlhf.tools.command_line.jobs import logged_job
from openrlhf.tools.verify.compare import REPORT, Difference, Gradient, Rounding, Scale, compared, on_cpu
from openrlhf.tools.verify.layouts import ALL
from openrlhf.tools.verify.report import Clock, Finding, Verdict, not_checked
from openrlhf.tools.verify.subjects import Subject


def choose_stages(subject: Subject) -> list[int]:
    """Returns the ZeRO stages to try: the run's own, the lowest one of the backend, and 3."""
    config = subject.config
    unsharded = 0 if config.train.backend == "deepspeed" else 2
    return sorted({unsharded, config.ds.zero_stage, 3})


def rank_checks(
    subject: Subject, folder: Path, expected: Gradient, scale: Scale, rounding: Rounding
) -> Iterator[Finding]:
    """Yields for each ZeRO stage whether several ranks compute the loss and gradient `expected`."""
    stages, clock = choose_stages(subject), Clock()
    names = {stage: f"ranks, ZeRO {stage}" for stage in stages}
    number = torch.cuda.device_count() if DEVICE_TYPE == "cuda" else 2
    claim = f"{max(number, 2)} ranks compute the loss and gradient of one rank"
    if number < 2:
        for name in names.values():
            yield not_checked(name, claim, "this machine has one GPU")
        return
    problem = launch(subject, folder, stages, number)
    seconds = clock.lap() / len(stages)
    meaning = (
        "Ranks average gradients that they should add up, compute the same rows, or shard a weight wrongly. "
        "Try another --ds.zero_stage or --train.backend."
    )
    for stage in stages:
        made = folder / f"{stage}.pt"
        if made.exists():
            difference = Difference.of(Gradient(*torch.load(made)), expected)
            yield compared(names[stage], claim, difference, scale, rounding, meaning, seconds)
        else:
            yield Finding(
                check=names[stage],
                claim=claim,
                verdict=Verdict.FAILED,
                error=math.inf,
                bound=rounding.bound,
                where=f"the job of ranks, which failed: {problem}",
                meaning=f"{meaning} {REPORT}",
            )


def launch(subject: Subject, folder: Path, stages: list[int], number: int) -> str:
    """Runs the job. Returns "" if it succeeded, else how it ended and the end of its output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "subject.pkl").write_bytes(pickle.dumps((subject, stages)))
    words = ["openrlhf.tools.verify.ranks", str(folder)]
    return logged_job(words, folder / "log", ranks=number)


def main(folder: Path) -> None:
    subject, stages = pickle.loads((folder / "subject.pkl").read_bytes())  # written by `launch`
    init_distributed()
    for stage in stages:
        subject.config = with_values(subject.config, {"ds.zero_stage": stage})
        with subject.running("fp32") as running:
            (step,) = running.steps([ALL])
            if int(os.environ["RANK"]) == 0:
                torch.save(tuple(on_cpu(step)), folder / f"{stage}.pt")
    leave_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
