"""Verifies a setup: compares a run's own model on this machine with transformers' own code, and with itself
in other layouts, dtypes and numbers of ranks. Start it like the run: with its command and flags, or with a
YAML file of flags. Prints which claims were proved, with errors and bounds, and writes a file for a bug
report."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.api import PPO, Command, catch_signals, check_launcher, choose_hub, short_errors, with_values
from openrlhf.tools.command_line.arguments import ArgumentParser, positive
from openrlhf.tools.command_line.run_files import task_type_of
from openrlhf.tools.plan.plan import invocation, parsed

if TYPE_CHECKING:
    from openrlhf.tools.verify.report import Finding
    from openrlhf.tools.verify.subjects import Size, Subject


def make_parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="openrlhf verify",
        description=__doc__,
        usage="openrlhf verify [--config] RUN.yaml|COMMAND [flags of the run] [--rows N] "
        "[--tokens N] [--layers N] [--no_ranks] [--no_engine] [--out FILE.json]",
        allow_abbrev=False,
    )
    made.add_argument(
        "--rows", type=positive, default=8, metavar="N", help="number of rows of the dataset (default: 8)"
    )
    made.add_argument(
        "--tokens",
        type=positive,
        default=512,
        metavar="N",
        help="maximum tokens of a row; longer rows are used if too few are that short (default: 512)",
    )
    made.add_argument(
        "--layers",
        type=positive,
        metavar="N",
        help="verify a copy with only the first N layers (faster)",
    )
    made.add_argument("--no_ranks", action="store_true", help="start no job of several ranks")
    made.add_argument("--no_engine", action="store_true", help="ppo: start no rollout engine")
    made.add_argument(
        "--out",
        type=Path,
        default=Path("verification.json"),
        metavar="FILE",
        help="report as JSON; the table is written beside it as .txt (default: verification.json)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options, command, flags = parsed(make_parser(), argv)
        check_launcher()
        catch_signals()
        sys.exit(run(command, flags, options))


def run(command: Command, flags: Sequence[str], options: argparse.Namespace) -> int:
    """Runs all checks. Returns 0 if none failed, else 1."""
    from openrlhf.tools.plan.hardware import this_machine

    config = invocation(command, flags, this_machine()).config
    choose_hub(config.use_ms)
    from openrlhf.api import init_distributed
    from openrlhf.tools.verify.report import Verdict, table, write_report
    from openrlhf.tools.verify.subjects import Size

    with tempfile.TemporaryDirectory(prefix="openrlhf-verify-") as scratch:
        init_distributed()
        config = _with_layers(command, config, options.layers, Path(scratch))
        subject = subject_of(command, config, Path(scratch), Size(rows=options.rows, tokens=options.tokens))
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


def subject_of(command: Command, config: Any, scratch: Path, size: "Size") -> "Subject":
    """Returns the model to verify, on the run's own rows."""
    from openrlhf.tools.verify.subjects import PolicySubject, SupervisedSubject

    if command.name == PPO.name:
        return PolicySubject(config, size)
    return SupervisedSubject(task_type_of(command.name), config, scratch, size)


def _with_layers(command: Command, config: Any, layers: int | None, scratch: Path) -> Any:
    """Returns the configuration with copies of its models that have only the first `layers` layers; None: the
    models as they are."""
    from openrlhf.tools.verify.subjects import cut

    if layers is None:
        return config
    keys = ["actor.model_name_or_path" if command.name == PPO.name else "model.model_name_or_path"]
    if command.name in ("dpo", "kto") and config.ref.model_name_or_path:
        keys.append("ref.model_name_or_path")
    changed = {}
    for key in keys:
        section, _, field = key.partition(".")
        path = getattr(getattr(config, section), field)
        changed[key] = cut(path, layers, scratch / f"{section}-of-{layers}-layers", f"--{key}")
    return with_values(config, changed)


def _checks(
    subject: "Subject", scratch: Path, *, engine: bool, ranks: bool
) -> "tuple[int, Iterator[Finding]]":
    """Returns the number of findings, and the findings of all checks."""
    from openrlhf.tools.verify.continuing import continuing_checks
    from openrlhf.tools.verify.engine import NAMES, engine_checks
    from openrlhf.tools.verify.ranks import stages_of
    from openrlhf.tools.verify.subjects import PolicySubject
    from openrlhf.tools.verify.trainer import number_of_checks, trainer_checks

    dtype, continued = subject.config.ds.param_dtype, scratch / "continuing"
    total = number_of_checks(dtype) + (len(stages_of(subject)) if ranks else 0) + 2
    job = scratch / "ranks" if ranks else None
    parts = [trainer_checks(subject, dtype, job), continuing_checks(subject, dtype, continued)]
    if engine and isinstance(subject, PolicySubject):
        parts.append(engine_checks(subject, dtype))
        total += len(NAMES)
    return total, chain.from_iterable(parts)


def _shown(total: int, findings: "Iterator[Finding]") -> "Iterator[Finding]":
    """Prints and yields each finding, with an estimate of the remaining time from the checks so far."""
    from openrlhf.tools.verify.report import Verdict

    start = time.monotonic()
    for number, finding in enumerate(findings, start=1):
        elapsed = time.monotonic() - start
        left = f"about {elapsed / number * (total - number):.0f} s left" if number < total else "done"
        measured = "" if finding.error is None else f" ({finding.error:.2g}, bound {finding.bound:.2g})"
        print(f"[{number}/{total}] {finding.check}: {finding.verdict}{measured}; {left}", flush=True)
        if finding.verdict is Verdict.FAILED:
            print(f"  {finding.meaning}", flush=True)
        yield finding


if __name__ == "__main__":
    main()
