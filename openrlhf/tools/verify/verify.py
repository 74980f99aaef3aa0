"""Compares what a run would compute with references (`openrlhf verify`)."""

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from openrlhf.api import (
    PPO,
    Command,
    init_distributed,
    with_values,
)
from openrlhf.tools.command_line.run_files import find_task_type
from openrlhf.tools.verify.continuing import continuing_checks
from openrlhf.tools.verify.engine import NAMES, engine_checks
from openrlhf.tools.verify.ranks import choose_stages
from openrlhf.tools.verify.report import Finding, Verdict, table, write_report
from openrlhf.tools.verify.subjects import PolicySubject, Size, Subject, SupervisedSubject, truncate_model
from openrlhf.tools.verify.trainer import number_of_checks, trainer_checks


def run(command: Command, config: Any, options: argparse.Namespace) -> int:
    """Runs all checks. Returns 0 if none failed, else 1."""
    with tempfile.TemporaryDirectory(prefix="openrlhf-verify-") as scratch:
        init_distributed()
        config = _with_layers(command, config, options.layers, Path(scratch))
        subject = build_subject(
            command, config, Path(scratch), Size(rows=options.rows, tokens=options.tokens)
        )
        if options.layers is not None:
            subject.notes["layers"] = f"only the first {options.layers}"
        wanted = {"engine": not options.no_engine, "ranks": not options.no_ranks}
        findings = list(_shown(*_checks(subject, Path(scratch), **wanted)))
    print(f"\n{table(findings)}")
    write_report(options.out, command.name, config, findings, subject.notes)
    failed = sum(finding.verdict is Verdict.FAILED for finding in findings)
    proved = sum(finding.verdict is Verdict.PROVED for finding in findings)
    print(
        f"\n{proved} proved, {failed} failed, {len(findings) - proved - failed} not checked; attach "
        f"{options.out} to a bug report"
    )
    return 1 if failed else 0


def build_subject(command: Command, config: Any, scratch: Path, size: Size) -> Subject:
    if command.name == PPO.name:
        return PolicySubject(config, size)
    return SupervisedSubject(find_task_type(command.name), config, scratch, size)


def _with_layers(command: Command, config: Any, layers: int | None, scratch: Path) -> Any:
    """Returns the configuration with copies of its models that have only the first `layers` layers; None: the
    models as they are."""
    if layers is None:
        return config
    keys = ["actor.model_name_or_path" if command.name == PPO.name else "model.model_name_or_path"]
    if command.name in ("dpo", "kto") and config.ref.model_name_or_path:
        keys.append("ref.model_name_or_path")
    changed = {}
    for key in keys:
        section, _, field = key.partition(".")
        path = getattr(getattr(config, section), field)
        changed[key] = truncate_model(path, layers, scratch / f"{section}-of-{layers}-layers", f"--{key}")
    return with_values(config, changed)


def _checks(subject: Subject, scratch: Path, *, engine: bool, ranks: bool) -> tuple[int, Iterator[Finding]]:
    dtype, continued = subject.config.ds.param_dtype, scratch / "continuing"
    total = number_of_checks(dtype) + (len(choose_stages(subject)) if ranks else 0) + 2
    job = scratch / "ranks" if ranks else None
    parts = [trainer_checks(subject, dtype, job), continuing_checks(subject, dtype, continued)]
    if engine and isinstance(subject, PolicySubject):
        parts.append(engine_checks(subject, dtype))
        total += len(NAMES)
    return total, chain.from_iterable(parts)


def _shown(total: int, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Prints and yields each finding, with an estimate of the remaining time from the checks so far."""
    start = time.monotonic()
    for number, finding in enumerate(findings, start=1):
        elapsed = time.monotonic() - start
        left = f"about {elapsed / number * (total - number):.0f} s left" if number < total else "done"
        measured = "" if finding.error is None else f" ({finding.error:.2g}, bound {finding.bound:.2g})"
        print(f"[{number}/{total}] {finding.check}: {finding.verdict}{measured}; {left}", flush=True)
        if finding.verdict is Verdict.FAILED:
            print(f"  {finding.meaning}", flush=True)
        yield finding
