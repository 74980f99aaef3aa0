"""Finds the first step, and in it the first quantity in causal order, in which two recorded runs differ: the
order of prompts, tokens, rewards, log-probs, advantages, metrics, or a tensor of a checkpoint. Also lists the
flags and versions that differ. The exit status is 0 if nothing differs, and 1 if something does."""

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.cli.arguments import ArgumentParser
from openrlhf.errors import ErrorCode, UsageError, short_errors


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf bisect", description=__doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="run folder (--logger.run_dir)")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="run folder of another run of this command")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        sys.exit(run(options.run_a, options.run_b))


def run(a: Path, b: Path) -> int:
    """Prints the first difference. Returns 0 if there is none, else 1."""
    from openrlhf.replay.bisect import bisect
    from openrlhf.replay.recorded import RecordedRun
    from openrlhf.replay.view import Screen

    runs = RecordedRun(a), RecordedRun(b)
    commands = [run.command for run in runs]
    _ = [run.flags for run in runs]  # raises where a folder is no run
    if commands[0] != commands[1]:
        text = f"is a run of `openrlhf {commands[1]}`, and {a} of `openrlhf {commands[0]}`"
        raise UsageError(ErrorCode.CONFLICT, text, flag="RUN_B", value=b)
    result = bisect(*runs)
    Screen(sys.stdout).bisection(result, (str(a), str(b)))
    return 0 if result.are_equal else 1


if __name__ == "__main__":
    main()
