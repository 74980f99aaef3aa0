"""The findings of a verification, their table with errors and bounds, and the file to attach to a bug
report."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from openrlhf.api import find_secrets, redact, to_yaml, write_atomically
from openrlhf.api import run_environment as environment


class Verdict(StrEnum):
    """Outcome of a check."""

    PROVED = "proved"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    """Short name."""
    claim: str
    """Statement that the check tests."""
    verdict: Verdict
    error: float | None = None
    """Largest difference that was found, relative unless `how` says otherwise; None if nothing was
    measured."""
    bound: float | None = None
    """Largest difference that rounding explains; 0: all bits must be equal."""
    how: str = ""
    """Derivation of the bound, or the reason why nothing was checked."""
    where: str = ""
    """Place of the largest difference."""
    meaning: str = ""
    """Usual causes of a failure, and what to do."""
    seconds: float = 0.0


def judged(check: str, claim: str, error: float, bound: float, **more: Any) -> Finding:
    """Returns a finding that is proved if the error is at most the bound. NaN fails."""
    verdict = Verdict.PROVED if error <= bound else Verdict.FAILED
    return Finding(check=check, claim=claim, verdict=verdict, error=error, bound=bound, **more)


def not_checked(check: str, claim: str, why: str) -> Finding:
    return Finding(check=check, claim=claim, verdict=Verdict.NOT_CHECKED, how=why)


class Clock:
    """Measures the seconds between calls."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds


def table(findings: Sequence[Finding]) -> str:
    rows = [("check", "verdict", "error", "bound", "seconds", "claim")]
    rows += [
        (f.check, f.verdict, _number(f.error), _number(f.bound), f"{f.seconds:.1f}", f.claim)
        for f in findings
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join([*map(str.ljust, row[:5], widths), row[5]]) for row in rows]
    hows = {f.how: [g.check for g in findings if g.how == f.how] for f in findings if f.how}
    lines += ["", "bounds and reasons"]
    lines += [f"  {', '.join(checks)}: {how}" for how, checks in hows.items()]
    for f in findings:
        if f.verdict is Verdict.FAILED:
            place = f" at {f.where}" if f.where else ""
            lines += ["", f"{f.check} FAILED: {f.claim}, but the difference is {_number(f.error)}{place}."]
            lines += [f"  {f.meaning}"] if f.meaning else []
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else "equal bits" if value == 0 else f"{value:.2g}"


def write_report(path: Path, command: str, config: Any, findings: Sequence[Finding], notes: Any) -> None:
    """Writes findings, versions, machine and the run's configuration to `path` as JSON, and the table beside
    it as .txt. Secrets are left out."""
    config_yaml = to_yaml(config)
    secrets = find_secrets(config_yaml, sys.argv, os.environ)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {"gpus": gpus, "cuda": torch.version.cuda, "torch": torch.__version__, "argv": sys.argv}
    content = {
        "command": command,
        "findings": [asdict(finding) for finding in findings],
        "notes": notes,
        "environment": {key: value for key, value in environment().items() if key != "host"} | machine,
        "config": config_yaml,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, redact(json.dumps(content, indent=1), secrets))
    lines = [table(findings), "", "notes", *(f"  {key}: {value}" for key, value in notes.items())]
    write_atomically(path.with_suffix(".txt"), redact("\n".join(lines) + "\n", secrets))
