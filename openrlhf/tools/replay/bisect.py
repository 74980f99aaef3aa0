"""Finds the first difference between two recorded runs: the first step that differs and, in it, the first
quantity in causal order (prompts, tokens, rewards, log-probs, advantages, metrics, tensors of a checkpoint).
Also lists the flags and versions that differ. With --commits, computes steps of one recorded run again with
the code of two commits, as `openrlhf replay` does, and compares the results. Nothing is written to run
folders or the repository. The exit status is 0 if nothing differs, and 1 if something does."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from openrlhf.api import ErrorCode, UsageError, catch_signals, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf bisect", description=__doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="run folder (--logger.run_dir)")
    parser.add_argument(
        "run_b", type=Path, metavar="RUN_B", nargs="?", help="run folder of another run of the same command"
    )
    parser.add_argument(
        "--commits", nargs=2, metavar=("GOOD", "BAD"), help="two versions of openrlhf, instead of RUN_B"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="last step that the commits compute, from the newest checkpoint before it (default: the last "
        "recorded one)",
    )
    parser.add_argument(
        "--repository", type=Path, metavar="DIR", help="clone of openrlhf (default: the one that runs)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        _check(options)
        if options.commits:
            catch_signals()
            sys.exit(run_commits(options.run_a, options.commits, options.step, options.repository))
        sys.exit(run(options.run_a, options.run_b))


def _check(options: argparse.Namespace) -> None:
    if options.run_b is None and not options.commits:
        text = "name a second run, or two commits with --commits GOOD BAD"
        raise UsageError(ErrorCode.MISSING_FLAG, text, flag="RUN_B")
    if options.run_b is not None and options.commits:
        text = "two commits compute steps of one run; name no second run"
        raise UsageError(ErrorCode.CONFLICT, text, flag="--commits", value=" ".join(options.commits))
    for flag, value in (("--step", options.step), ("--repository", options.repository)):
        if value is not None and not options.commits:
            raise UsageError(ErrorCode.CONFLICT, "needs --commits GOOD BAD", flag=flag, value=value)


def run(a: Path, b: Path) -> int:
    """Prints the first difference. Returns 0 if there is none, else 1."""
    from openrlhf.tools.replay.compare import bisect
    from openrlhf.tools.replay.recorded import RecordedRun
    from openrlhf.tools.replay.view import Screen

    runs = RecordedRun(a), RecordedRun(b)
    commands = [run.command for run in runs]
    _ = [run.flags for run in runs]  # raises if a folder is not a run
    if commands[0] != commands[1]:
        text = f"a run of `openrlhf {commands[1]}`, but {a} is one of `openrlhf {commands[0]}`"
        raise UsageError(ErrorCode.CONFLICT, text, flag="RUN_B", value=b)
    result = bisect(*runs)
    Screen(sys.stdout).bisection(result, (str(a), str(b)))
    return 0 if result.are_equal else 1


def run_commits(
    path: Path, names: Sequence[str], step: int | None = None, repository: Path | None = None
) -> int:
    """Prints the first difference between two commits' results. Returns 0 if there is none, else 1."""
    from openrlhf.tools.replay.commits import Repository, bisect_commits
    from openrlhf.tools.replay.recorded import RecordedRun
    from openrlhf.tools.replay.rerun import Rerun
    from openrlhf.tools.replay.view import Screen

    recorded = RecordedRun(path)
    _ = recorded.flags  # raises if the folder is no run
    step = max(recorded.steps, default=0) if step is None else step
    clone = Repository.around(repository)
    commits = [clone.commit(name) for name in names]
    with TemporaryDirectory(prefix="openrlhf_bisect_") as temporary:
        folder = Path(temporary).resolve()
        reruns = [
            Rerun(run=recorded, step=step, folder=folder / side, code=folder / f"{side}_code", saves=True)
            for side in ("good", "bad")
        ]
        reruns[0].check()
        result = bisect_commits(reruns, commits, clone)
        print(f"{path}: step {step} computed by two commits, from {reruns[0].beginning}")
        Screen(sys.stdout).bisection(result, (str(commits[0]), str(commits[1])))
    return 0 if result.are_equal else 1


if __name__ == "__main__":
    main()
