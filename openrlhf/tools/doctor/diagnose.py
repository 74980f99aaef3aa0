"""Runs all checks of a run, and prints their findings in order."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.padding import Padding
from rich.text import Text

from openrlhf.api import counted
from openrlhf.tools.command_line.terminal import build_console
from openrlhf.tools.doctor.finding import Finding
from openrlhf.tools.doctor.memory import memory_findings
from openrlhf.tools.doctor.mismatch import mismatch_findings
from openrlhf.tools.doctor.policy import policy_findings, warning_findings
from openrlhf.tools.doctor.record import RunRecord
from openrlhf.tools.doctor.rewards import reward_findings
from openrlhf.tools.doctor.speed import speed_findings
from openrlhf.tools.doctor.stalls import stall_findings

CHECKS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    stall_findings,
    reward_findings,
    policy_findings,
    memory_findings,
    speed_findings,
)

SIGNS = (
    "rollout/reward_mean",
    "reward/zero_std_fraction",
    "rollout/failed_ratio",
    "rollout/truncated_rate",
    "rollout/duplicate_ratio",
    "policy/entropy",
    "mismatch/abs_diff_mean",
    "grad_norm",
    "timing/step_total",
)
"""Metrics that are printed for a healthy run."""
COLORS = {"certain": "bold red", "likely": "bold yellow", "possible": "bold"}


def diagnose(run: RunRecord, model: Path | None = None) -> list[Finding]:
    """Returns causes of a run's problems, the surest first, slowness last. `model`: as in
    `mismatch_findings`."""
    found = [*mismatch_findings(run, model), *(finding for check in CHECKS for finding in check(run))]
    causes = {finding.cause.partition(":")[0] for finding in found}
    if "destroyed-model" in causes:
        explained = {"flat-reward", "truncation", "entropy-collapse", "loss-rises"}
        found = [finding for finding in found if finding.cause not in explained]
    found += warning_findings(run, causes)
    return sorted(found, key=lambda finding: (not finding.is_wrong, -finding.score))


def is_healthy(findings: Sequence[Finding]) -> bool:
    return not any(finding.is_wrong for finding in findings)


def describe_state(run: RunRecord) -> str:
    """Describes the progress of the run, and whether its process is alive."""
    text = f"{run.path}: {counted(len(run.rows), 'row')} of metrics, last step {run.last_step}"
    if run.process is not None:
        return f"{text}; running (process {run.process.pid})"
    if run.owner is not None and not run.owner.is_here:
        return f"{text}; started on {run.owner.host}, whose processes cannot be seen from here"
    return f"{text}; not running"


def list_signs(run: RunRecord) -> Iterator[str]:
    """Yields the course of the metrics that show a run's progress and health."""
    scores = [name for name in run.names("eval/") if name.endswith("_score_mean")]
    losses = [name for name in run.names("") if name.endswith(("/loss", "/accuracy"))]
    for name in (*scores, *SIGNS, *losses):
        if len(series := run.series(name)):
            yield series.describe()


def as_json(run: RunRecord, findings: list[Finding]) -> str:
    data: dict[str, Any] = {
        "run": str(run.path),
        "last_step": run.last_step,
        "running": run.process is not None,
        "healthy": is_healthy(findings),
        "findings": [finding.as_data() for finding in findings],
        "signs": list(list_signs(run)),
    }
    return json.dumps(data, indent=2)


def show(run: RunRecord, findings: list[Finding], stream: TextIO) -> None:
    """Prints the findings, for a healthy run after the course of its metrics."""
    console = build_console(stream)
    say = lambda text, style="", indent=0: console.print(
        Padding(Text(text, style=style), (0, 0, 0, indent), expand=False)
    )
    say(describe_state(run))
    if is_healthy(findings):
        say("\nhealthy: no problem was found" + ", but it could be faster" * bool(findings), "bold green")
        for line in list_signs(run):
            say(f"- {line}", indent=3)
    for number, finding in enumerate(findings, start=1):
        say(f"\n{number}. {finding.title} ({finding.confidence})", COLORS[finding.confidence])
        for line in finding.evidence:
            say(f"- {line}", indent=3)
        say(f"remedy: {finding.remedy}", "green", indent=3)
