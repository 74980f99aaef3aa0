"""Computes a step of a recorded run again, from the newest checkpoint before it, and compares the numbers
with those that the run recorded, bit for bit: metrics, in reinforcement learning the log-probs, values and
advantages of every token, and the checkpoint of the step if there is one. Recorded samples replace engines
and rewards. Nothing is written to the run's folders. The exit status is 0 if everything is equal, and 1 if
something differs."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from openrlhf.api import ErrorCode, UsageError, catch_signals, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf replay", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (--logger.run_dir)")
    parser.add_argument("--step", type=int, metavar="N", required=True, help="step to compute again")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="new or empty folder for the results, which is kept (default: a temporary folder)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        catch_signals()
        sys.exit(run(options.run, options.step, options.folder))


def run(path: Path, step: int, folder: Path | None = None) -> int:
    """Prints the comparison. Returns 0 if everything is equal, else 1."""
    from openrlhf.tools.replay.recorded import RecordedRun
    from openrlhf.tools.replay.rerun import Rerun, compare
    from openrlhf.tools.replay.view import Screen

    recorded = RecordedRun(path)
    _ = recorded.flags  # raises if the folder is no run
    with ExitStack() as held:
        if folder is None:
            folder = Path(held.enter_context(TemporaryDirectory(prefix="openrlhf_replay_")))
        elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            text = f"is {'not empty' if folder.is_dir() else 'not a folder'}; name a new folder"
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--folder", value=folder)
        rerun = Rerun(run=recorded, step=step, folder=folder.resolve())
        rerun.check()
        folder.mkdir(parents=True, exist_ok=True)
        rerun.compute()
        result = compare(rerun)
        Screen(sys.stdout).replay(rerun, result)
    return 0 if result.is_equal else 1


if __name__ == "__main__":
    main()
