"""The flags of `openrlhf doctor`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import short_errors
from openrlhf.tools.command_line.arguments import RUN, ArgumentParser, run


def doctor_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf doctor", description=doctor.__doc__)
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        metavar="RUN",
        help=f"{RUN}; without it, the installation is examined",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="model that the run started from, to recompute log-probs (default: --actor.model_name_or_path)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def doctor(argv: Sequence[str] | None = None) -> None:
    """Examines the installation, or a run from the files of its folder, whether it still runs or not. Names
    the causes of problems, the surest first, each with evidence and a remedy."""
    with short_errors():
        options = doctor_parser().parse_args(argv)
        if options.run is None:
            sys.exit(run("openrlhf.tools.doctor.doctor:examine_installation", options.json))
        sys.exit(run("openrlhf.tools.doctor.doctor:examine_run", options.run, options.model, options.json))
