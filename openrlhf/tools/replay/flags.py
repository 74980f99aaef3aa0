"""The flags of `openrlhf replay` and `openrlhf bisect`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import ErrorCode, UsageError, catch_signals, short_errors
from openrlhf.tools.command_line.arguments import RUN, ArgumentParser, run, whole


def replay_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf replay", description=replay.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN)
    parser.add_argument("--step", type=whole(0), metavar="N", required=True, help="step to compute again")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="new or empty folder for the results, which is kept (default: a temporary folder)",
    )
    return parser


def replay(argv: Sequence[str] | None = None) -> None:
    """Computes a step of a recorded run again, from the newest checkpoint before it, and compares the numbers
    with those that the run recorded, bit for bit: metrics, in reinforcement learning the log-probs, values
    and advantages of every token, and the checkpoint of the step if there is one. Recorded samples replace
    engines and rewards. Nothing is written to the run's folders. The exit status is 0 if everything is equal,
    and 1 if something differs."""
    with short_errors():
        options = replay_parser().parse_args(argv)
        catch_signals()
        sys.exit(run("openrlhf.tools.replay.replay:run", options.run, options.step, options.folder))


def bisect_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf bisect", description=bisect.__doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help=RUN)
    parser.add_argument(
        "run_b", type=Path, metavar="RUN_B", nargs="?", help="another run of the same command"
    )
    parser.add_argument(
        "--commits", nargs=2, metavar=("GOOD", "BAD"), help="two versions of openrlhf, instead of RUN_B"
    )
    parser.add_argument(
        "--step",
        type=whole(0),
        metavar="N",
        help="last step that the commits compute, from the newest checkpoint before it (default: the last "
        "recorded one)",
    )
    parser.add_argument(
        "--repository", type=Path, metavar="DIR", help="clone of openrlhf (default: the one that runs)"
    )
    return parser


def bisect(argv: Sequence[str] | None = None) -> None:
    """Finds the first difference between two recorded runs: the first step that differs and, in it, the first
    quantity in causal order (prompts, tokens, rewards, log-probs, advantages, metrics, tensors of a
    checkpoint). Also lists the flags and versions that differ. With --commits, computes steps of one recorded
    run again with the code of two commits, as `openrlhf replay` does, and compares the results. Nothing is
    written to run folders or the repository. The exit status is 0 if nothing differs, and 1 if something
    does."""
    with short_errors():
        options = bisect_parser().parse_args(argv)
        _check(options)
        if not options.commits:
            sys.exit(run("openrlhf.tools.replay.replay:bisect_runs", options.run_a, options.run_b))
        catch_signals()
        given = options.run_a, options.commits, options.step, options.repository
        sys.exit(run("openrlhf.tools.replay.replay:bisect_versions", *given))


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
