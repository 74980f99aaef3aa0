"""The flags of `openrlhf verify`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import (
    ErrorCode,
    UsageError,
    catch_signals,
    check_launcher,
    choose_hub,
    short_errors,
    unwritable,
)
from openrlhf.tools.command_line.arguments import ArgumentParser, positive, run
from openrlhf.tools.plan.flags import invocation, parsed
from openrlhf.tools.plan.hardware import this_machine


def verify_parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="openrlhf verify",
        description=verify.__doc__,
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


def verify(argv: Sequence[str] | None = None) -> None:
    """Verifies a setup: compares a run's own model on this machine with transformers' own code, and with
    itself in other layouts, dtypes and numbers of ranks. Start it like the run: with its command and flags,
    or with a YAML file of flags. Prints which claims were proved, with errors and bounds, and writes a file
    for a bug report."""
    with short_errors():
        options, command, flags = parsed(verify_parser(), argv)
        out = options.out
        reason = "it is a folder" if out.is_dir() else unwritable(out.parent)
        if reason := "the table has the name with .txt" if out.suffix == ".txt" else reason:
            text = f"the report cannot be written: {reason}; name a new file .json"
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--out", value=out)
        check_launcher()
        catch_signals()
        config = invocation(command, flags, this_machine()).config
        choose_hub(config.use_ms)
        sys.exit(run("openrlhf.tools.verify.verify:run", command, config, options))
