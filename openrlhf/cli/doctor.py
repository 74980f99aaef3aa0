"""Examines a run, live or dead, from the files of its folder, and names the causes of what is wrong, from the
surest on, each with evidence and remedy."""

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.cli.arguments import ArgumentParser
from openrlhf.errors import short_errors


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf doctor", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (--logger.run_dir)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        sys.exit(examine_run(options.run, as_data=options.json))


def examine_run(path: Path, *, as_data: bool) -> int:
    """Prints the findings of a run. Returns 1 if there are any, else 0."""
    from openrlhf.diagnosis.diagnose import as_json, diagnose, show
    from openrlhf.diagnosis.record import RunRecord

    run = RunRecord.read(path)
    findings = diagnose(run)
    if as_data:
        print(as_json(run, findings))
    else:
        show(run, findings, sys.stdout)
    return int(bool(findings))


if __name__ == "__main__":
    main()
