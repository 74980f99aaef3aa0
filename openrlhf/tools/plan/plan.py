"""Predicts placement, batches, memory and time of a training run from its configuration, without weights,
GPUs or Ray. Takes what the run takes: a command with its flags, or a YAML file of flags."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.api import PPO, Command, choose_hub, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser, positive
from openrlhf.tools.command_line.run_files import command_and_flags

if TYPE_CHECKING:
    from openrlhf.api import Invocation
    from openrlhf.tools.plan.estimate import Assumed
    from openrlhf.tools.plan.hardware import Cluster


def parser(prog: str, description: str | None) -> ArgumentParser:
    """Returns the parser of the options that describe the hardware and the data."""
    made = ArgumentParser(
        prog=prog,
        description=description,
        usage=f"{prog} RUN.yaml|COMMAND [flags of the run] [--cluster NODESxGPUSxKIND] [...]",
        allow_abbrev=False,
    )
    made.add_argument(
        "--cluster",
        metavar="NODESxGPUSxKIND",
        help="cluster, such as 8x8xH100-80GB or 8xA100-40GB (default: this machine)",
    )
    made.add_argument("--prompt_tokens", type=positive, metavar="N", help="mean tokens of a prompt")
    made.add_argument(
        "--response_tokens",
        type=positive,
        metavar="N",
        help="mean tokens of a response, or of a sequence in supervised learning (default: half the maximum)",
    )
    made.add_argument("--rows", type=positive, metavar="N", help="rows of the dataset (default: counted)")
    made.add_argument(
        "--rates", type=Path, metavar="FILE", help="measured rates: gpu_report.json of benchmarks/gpu.py"
    )
    return made


def parsed(own: ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Command, list[str]]:
    """Separates the options of `own` from the run's command and its flags. Without any, or with --help as the
    first word, prints the help and exits."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if words[0] in ("--help", "-h"):
        own.print_help()
        sys.exit()
    options, rest = own.parse_known_args(words)
    return options, *command_and_flags(rest, own.prog)


def make_parser() -> ArgumentParser:
    own = parser("openrlhf plan", __doc__)
    own.add_argument("--json", action="store_true", help="print the plan as JSON")
    return own


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options, command, flags = parsed(make_parser(), argv)
        sys.exit(run(command, flags, cluster_of_options(options), options))


def run(command: Command, flags: Sequence[str], cluster: "Cluster", options: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 if the run fits, else 1."""
    from openrlhf.tools.plan.estimate import plan_run, suggestion
    from openrlhf.tools.plan.view import as_data, show

    config = invocation(command, flags, cluster).config
    choose_hub(config.use_ms)
    assumed = assumed_of(options)
    plan = plan_run(command, config, cluster, assumed)
    suggested = None if plan.fits else suggestion(command, config, cluster, assumed)
    if options.json:
        print(json.dumps(as_data(plan, config, suggested), indent=2))
    else:
        show(plan, config, suggested, sys.stdout)
    return 0 if plan.fits else 1


def invocation(command: Command, flags: Sequence[str], cluster: "Cluster") -> "Invocation":
    """Parses the flags of a run on a cluster. Unset placement flags are chosen for it; supervised commands
    have one rank per device."""
    from openrlhf.api import parse

    if command.name != PPO.name:
        with _launched(cluster.devices):
            return parse(command, flags)
    from openrlhf.api import resolve

    choose = lambda config, explicit, _: resolve(config, explicit, cluster.gpus)
    return parse(command, flags, resolve=choose)


@contextmanager
def _launched(ranks: int) -> Iterator[None]:
    """Sets WORLD_SIZE, the number of ranks, as a launcher does, unless it is set already."""
    if "WORLD_SIZE" in os.environ:
        yield
        return
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def cluster_of_options(options: argparse.Namespace) -> "Cluster":
    from openrlhf.tools.plan.hardware import cluster_of, this_machine, with_measured

    cluster = cluster_of(options.cluster) if options.cluster else this_machine()
    return with_measured(cluster, options.rates) if options.rates else cluster


def assumed_of(options: argparse.Namespace) -> "Assumed":
    from openrlhf.tools.plan.estimate import Assumed

    return Assumed(prompt=options.prompt_tokens, response=options.response_tokens, rows=options.rows)


if __name__ == "__main__":
    main()
