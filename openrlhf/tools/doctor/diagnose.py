"""Examines the installation or a run, and prints the findings in order, or the text of a bug report without
secrets and local paths (`openrlhf doctor`)."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from openrlhf.api import KEY_METRICS, counted, find_secrets, redact, run_environment
from openrlhf.tools.command_line.installation import facts
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.command_line.terminal import build_console, say
from openrlhf.tools.doctor.memory import memory_findings
from openrlhf.tools.doctor.mismatch_findings import mismatch_findings
from openrlhf.tools.doctor.policy import policy_findings, warning_findings
from openrlhf.tools.doctor.record import Finding, RunRecord
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

COLORS = {"certain": "bold red", "likely": "bold yellow", "possible": "bold"}


def diagnose(run: RunRecord, model: Path | None = None) -> list[Finding]:
    """Returns causes of problems, the surest first, slowness last. `model`: see `mismatch_findings`."""
    found = [*mismatch_findings(run, model), *(finding for check in CHECKS for finding in check(run))]
    causes = {finding.cause.partition(":")[0] for finding in found}
    if "truncation" in causes:  # where most answers are cut, `flat-reward` is left out
        causes.add("flat-reward")
    if "destroyed-model" in causes:
        explained = {"flat-reward", "truncation", "entropy-collapse", "loss-rises", "degraded-policy"}
        found = [finding for finding in found if finding.cause not in explained]
    found += warning_findings(run, causes)
    return sorted(found, key=lambda finding: (not finding.is_wrong, -finding.score))


def is_healthy(findings: Sequence[Finding]) -> bool:
    return not any(finding.is_wrong for finding in findings)


def describe_state(run: RunRecord) -> str:
    text = f"{run.path}: {counted(len(run.rows), 'row')} of metrics, last step {run.last_step}"
    if run.process is not None:
        return f"{text}; running (process {run.process.pid})"
    if run.owner is not None and not run.owner.is_here:
        return f"{text}; started on {run.owner.host}, whose processes cannot be seen from here"
    return f"{text}; not running"


def list_signs(run: RunRecord) -> Iterator[str]:
    """Yields the courses of the metrics that a run shows on its lines, for a healthy run."""
    held_out = [n for n in run.names("eval/") if n.endswith(("_score_mean", "/loss", "/accuracy"))]
    for name in (*held_out, *KEY_METRICS, "timing/step_total"):
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
    console = build_console(stream)
    tell = lambda text, style="", indent=0: console.print(
        Padding(Text(text, style=style), (0, 0, 0, indent), expand=False)
    )
    tell(describe_state(run))
    if is_healthy(findings):
        tell("\nhealthy: no problem was found" + ", but it could be faster" * bool(findings), "bold green")
        for line in list_signs(run):
            tell(f"- {line}", indent=3)
    for number, finding in enumerate(findings, start=1):
        tell(f"\n{number}. {finding.title} ({finding.confidence})", COLORS[finding.confidence])
        for line in finding.evidence:
            tell(f"- {line}", indent=3)
        tell(f"remedy: {finding.remedy}", "green", indent=3)


def examine_installation(as_data: bool) -> int:
    """Prints the facts of the installation and their problems. Returns 1 if there are problems, else 0."""
    found = list(facts())
    problems = [fact for fact in found if fact.problem]
    if as_data:
        print(json.dumps({"healthy": not problems, "facts": [asdict(fact) for fact in found]}, indent=2))
        return int(bool(problems))
    console = build_console(sys.stdout)
    table = Table.grid(padding=(0, 2))
    for fact in found:
        mark = Text("wrong", "bold red") if fact.problem else Text("ok", "green")
        table.add_row(mark, Text(fact.name), Text(fact.found))
    console.print(table)
    for fact in problems:
        say(console, f"\n{fact.name}: {fact.problem}", "bold red")
        say(console, f"  remedy: {fact.remedy}", "green")
    if not problems:
        say(console, "\nnothing is wrong", "bold green")
    return int(bool(problems))


def examine_run(path: Path, model: Path | None = None, as_data: bool = False) -> int:
    """Prints the findings of a run. Returns 1 if anything is wrong, else 0, also if it is slow."""
    run = RunRecord(find_run(path))
    findings = diagnose(run, model)
    if as_data:
        print(as_json(run, findings))
    else:
        show(run, findings, sys.stdout)
    return int(not is_healthy(findings))


_PATH = re.compile(r"(?<![\w.:/~<>-])/(?!dev/|proc/|sys/)(?:[^\s/'\"=,:;]+/)+([^\s/'\"=,:;]*)")
"""An absolute path; its group is the last part. The rest of a URL is none."""
PLACES = ("address", "cache")
"""Facts about the installation that name the machine or a folder."""


def show_report(path: Path | None) -> int:
    run = RunRecord(find_run(path)) if path else None
    print("\n".join(_lines(run)))
    return 0


def _lines(run: RunRecord | None) -> Iterator[str]:
    config, argv = (str(run.read(name)) if run else "" for name in ("config.yaml", "argv.txt"))
    secrets = find_secrets(config, [*sys.argv, *argv.split()], os.environ)
    host = re.compile(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])")
    clean = lambda text: host.sub("<host>", _PATH.sub(r"<path>/\1", redact(text, secrets)))
    about = run_environment()
    yield "### Installation\n\n```text"
    for fact in facts():
        if fact.name not in PLACES or fact.problem:
            yield clean(f"{fact.name}: {fact.found}" + (f" ({fact.problem})" if fact.problem else ""))
    for title, found in (("version", about["versions"]), ("variable", about["variables"])):
        yield from (clean(f"{title} {name}: {value}") for name, value in found.items())
    yield clean(f"commit: {about['git']['openrlhf']}")
    yield "```"
    if run is None:
        return
    yield "\n### Command\n\n```text"
    yield clean(argv.strip())
    yield "```\n\n### Findings\n\n```text"
    yield clean(describe_state(run))
    for finding in diagnose(run):
        yield clean(f"{finding.title} ({finding.confidence})")
        yield from (clean(f"  - {line}") for line in finding.evidence)
    yield from (clean(f"warning at step {row['step']}: {row['text']}") for row in run.warnings)
    yield "```\n\n### Configuration\n\n```yaml"
    yield clean(config.strip())
    yield "```"
