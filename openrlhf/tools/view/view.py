"""Serves a local web page with the curves of one or several runs and every rollout."""

import sys
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from openrlhf.api import ErrorCode, RunFolder, UsageError, counted, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser

DEFAULT_PORT = 8890
PACKAGES = ("duckdb", "plotly")


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf view", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folders (--logger.run_dir), or a folder with runs below it, such as ckpt",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port on 127.0.0.1 (default: {DEFAULT_PORT}; 0: any free one)",
    )
    parser.add_argument("--no_browser", action="store_true", help="print the address, and open no browser")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options = make_parser().parse_args(argv)
        run(runs_of(options.runs), options.port, opens_browser=not options.no_browser)


def run(folders: Sequence[Path], port: int, *, opens_browser: bool) -> None:
    """Serves the page of these run folders until Ctrl-C."""
    for name in PACKAGES:
        if find_spec(name) is None:
            text = 'the package is not installed.\nRun: pip install "openrlhf[view]"'
            raise UsageError(ErrorCode.MISSING_PACKAGE, text, value=name)
    from openrlhf.tools.view.rollouts import token_texts
    from openrlhf.tools.view.server import Viewer, bind, serve

    bound = bind(port)

    def say(address: str) -> None:
        print(f"{counted(len(folders), 'run')} at {address}\nEnd with Ctrl-C", flush=True)
        if opens_browser:
            webbrowser.open(address)

    serve(Viewer(folders, token_texts), bound, say)


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the run folders that paths name: each itself, or those below. Raises UsageError for others."""
    found: list[Path] = []
    for path in paths:
        is_run = RunFolder(path).is_run
        below = (inner for inner in path.glob("**/") if "previous" not in inner.relative_to(path).parts)
        inside = [path] if is_run else sorted(inner for inner in below if RunFolder(inner).is_run)
        if not inside:
            text = "is no run folder and has none inside; give the folder of a run (--logger.run_dir)"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=path)
        found += [folder for folder in inside if folder not in found]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
