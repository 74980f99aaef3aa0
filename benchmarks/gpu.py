"""Checks and measures every part of openrlhf on a GPU, without a network, by any Python that has torch.

Stages run one after the other, each in processes of its own with a limit of time. No stage can end the
others: one that raises, hangs or crashes leaves a verdict, its output and the stacks of its processes. Models
have random weights and the shapes of Qwen3. A stage whose packages or GPUs are missing is skipped and names
them.

    python3 benchmarks/gpu.py                           every stage
    python3 benchmarks/gpu.py --out DIR --budget 540    the most valuable stages in nine minutes
    python3 benchmarks/gpu.py facts kernels             only these stages
    python3 benchmarks/gpu.py --rehearse                tiny shapes on a CPU, to see that stages run

DIR gets gpu_report.md, gpu_report.json and logs.txt, renewed after every stage, and stacks.txt if a stage
was stopped. The exit code is 1 if a stage failed.
"""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from gpukit.inside import perform
from gpukit.processes import Ended, run_stage
from gpukit.report import Report
from gpukit.stage import Setting, Stage, Verdict

RESERVE_S = 10
"""Seconds of the budget that are kept for the stacks and the report of a stage that is stopped."""


def main() -> None:
    stages = table()
    options = parse_options(stages)
    if options.inside:
        perform(stages[options.inside], Setting(rehearsal=options.rehearse), options.result)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage under way too
    deadline = time.monotonic() + options.budget - RESERVE_S
    report = Report(options.out, sys.argv, rehearsal=options.rehearse)
    for name in options.stages or stages:
        verdict, stacks = judge(name, stages[name], options, deadline - time.monotonic(), report)
        report.add(verdict, stacks)
        print(verdict, flush=True)
    print(f"report: {options.out / 'gpu_report.md'}")
    sys.exit(any(verdict.outcome == "fail" for verdict in report.verdicts))


def table() -> dict[str, Stage]:
    """Returns the stages by name. GPUKIT_STAGES names another module with `STAGES`."""
    return importlib.import_module(os.environ.get("GPUKIT_STAGES", "gpukit.stages")).STAGES


def parse_options(stages: dict[str, Stage]) -> argparse.Namespace:
    listed = "\n".join(f"    {name:24} {stage.shows}" for name, stage in stages.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help="stages to run (default: all, most valuable first)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_report"), metavar="DIR", help="folder of the report"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="maximum seconds for all stages together"
    )
    parser.add_argument("--limit", type=float, default=float("inf"), help="maximum seconds for one stage")
    parser.add_argument("--rehearse", action="store_true", help="run tiny shapes on a CPU")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.stages) - set(stages):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    return options


def judge(
    name: str, stage: Stage, options: argparse.Namespace, left: float, report: Report
) -> tuple[Verdict, str]:
    """Returns the verdict of a stage, and the stacks of its processes if it had to be stopped."""
    expected = 0 if options.rehearse else stage.seconds
    if left <= expected:
        reason = f"{max(left, 0):.0f} s left of --budget, and it takes about {stage.seconds:.0f}"
        return Verdict(stage=name, outcome="skip", reason=reason), ""
    limit = min(stage.limit, options.limit, left)
    log = report.begin()
    try:
        with tempfile.TemporaryDirectory(prefix="gpukit-", ignore_cleanup_errors=True) as folder:
            flags = ["--rehearse"] * options.rehearse
            ended = run_stage(name, flags, folder=Path(folder), log=log, limit=limit)
    except OSError as error:  # a full disk, or no process left
        return Verdict(stage=name, outcome="fail", reason=f"could not be run: {error}"), ""
    return verdict_of(name, ended, limit, log.read_text(errors="replace")), ended.stacks


def verdict_of(name: str, ended: Ended, limit: float, log: str) -> Verdict:
    if ended.result is None:
        how = (
            f"stopped after {limit:.0f} s; stacks.txt says where"
            if ended.code is None
            else ended_by(ended.code)
        )
        return Verdict(stage=name, outcome="fail", seconds=ended.seconds, reason=f"{how}: {last_line(log)}")
    reasons = [ended.result.get("reason", "")]
    if ended.code is None:
        reasons.append(f"reported its figures, but did not end within {limit:.0f} s; stacks.txt says why")
    elif ended.code:
        reasons.append(f"reported its figures, then {ended_by(ended.code)}")
    return Verdict(
        stage=name,
        outcome=ended.result["outcome"],
        seconds=ended.seconds,
        figures=ended.result.get("figures", {}),
        reason="; ".join(filter(None, reasons)),
    )


def ended_by(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


if __name__ == "__main__":
    main()
