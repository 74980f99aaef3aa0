"""The flags of `openrlhf rollouts`, `openrlhf watch` and `openrlhf view`."""

from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import short_errors
from openrlhf.tools.command_line.arguments import RUN, ArgumentParser, check_packages, positive, run, whole

DEFAULT_PORT = 8890
PACKAGES = ("duckdb", "plotly")
NAMES = ("step", "eval", "filtered")
ORDERS = ("reward", "score", "length")


def rollouts_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf rollouts", description=rollouts.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN)
    parser.add_argument("--step", type=whole(0), metavar="N", help="RL step (default: the last)")
    parser.add_argument("--prompt", type=int, metavar="ID", help="only samples of this prompt_id")
    parser.add_argument("--failed", action="store_true", help="only samples without a reward")
    parser.add_argument(
        "--sort", choices=ORDERS, help="print the largest first (default: in the order of sampling)"
    )
    parser.add_argument(
        "--name",
        choices=NAMES,
        default="step",
        help="samples of a training step (default), of an evaluation, or dropped by dynamic filtering",
    )
    parser.add_argument(
        "--limit", type=positive, default=8, metavar="N", help="samples to print (default: 8)"
    )
    return parser


def rollouts(argv: Sequence[str] | None = None) -> None:
    """Prints samples of an RL run, from its last step or any other, with tokens coloured by advantage."""
    with short_errors():
        run("openrlhf.tools.view.rollouts:run", rollouts_parser().parse_args(argv))


def watch_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf watch", description=watch.__doc__, epilog="Leave with q or Ctrl-C; the run goes on."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN)
    parser.add_argument(
        "--once", action="store_true", help="print one frame as text and exit (default without a terminal)"
    )
    parser.add_argument(
        "--width",
        type=whole(20),
        metavar="N",
        help="columns of a printed frame (default: the terminal's, or 120)",
    )
    return parser


def watch(argv: Sequence[str] | None = None) -> None:
    """Shows a run on one screen, while it runs or after its end: steps and remaining time, phases, curves,
    sampling, warnings and the newest samples. Reads only the run folder."""
    with short_errors():
        options = watch_parser().parse_args(argv)
        run("openrlhf.tools.view.watch:run", options.run, options.once, options.width)


def view_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf view", description=view.__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folders (--logger.run_dir), or a folder with runs below it, such as ckpt",
    )
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        default=DEFAULT_PORT,
        help=f"port on 127.0.0.1 (default: {DEFAULT_PORT}; 0: any free one)",
    )
    parser.add_argument("--no_browser", action="store_true", help="print the address, and open no browser")
    return parser


def view(argv: Sequence[str] | None = None) -> None:
    """Serves a local web page with the curves of one or several runs and every rollout."""
    with short_errors():
        options = view_parser().parse_args(argv)
        check_packages(dict.fromkeys(PACKAGES, 'the page needs it.\nRun: pip install "openrlhf[view]"'))
        run("openrlhf.tools.view.server:run", options.runs, options.port, not options.no_browser)
