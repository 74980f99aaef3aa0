"""The flags of `openrlhf doctor` and `openrlhf explain`."""

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
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the text of a bug report: versions, machine, command and findings, without secrets and "
        "local paths",
    )
    return parser


def doctor(argv: Sequence[str] | None = None) -> None:
    """Examines the installation, or a run from the files of its folder, whether it still runs or not. Names
    the causes of problems, the surest first, each with evidence and a remedy."""
    with short_errors():
        options = doctor_parser().parse_args(argv)
        if options.report:
            sys.exit(run("openrlhf.tools.doctor.diagnose:show_report", options.run))
        if options.run is None:
            sys.exit(run("openrlhf.tools.doctor.diagnose:examine_installation", options.json))
        sys.exit(run("openrlhf.tools.doctor.diagnose:examine_run", options.run, options.model, options.json))


def explain_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf explain", description=explain.__doc__)
    parser.add_argument(
        "error",
        nargs="*",
        metavar="ERROR",
        help="a code, such as missing-column; the text of an error; the path of a log; - for stdin. Without "
        "it, all codes and names are listed",
    )
    return parser


def explain(argv: Sequence[str] | None = None) -> None:
    """Explains an error: of openrlhf by its code, one of Ray, vLLM, DeepSpeed, NCCL, CUDA, transformers or
    the system by its text."""
    with short_errors():
        options = explain_parser().parse_args(argv)
        sys.exit(run("openrlhf.tools.doctor.explain:explain", options.error))
