"""Rehearses a training run on the CPU cores of this machine in minutes: the same flags, data and reward
function, with shrunk models and few ranks. Tries losses, weight sync, checkpoint, resume, evaluation and
export. Takes what the run takes: a command with its flags, or a YAML file of flags."""

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.api import PPO, Command, catch_signals, choose_hub, notify, short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser
from openrlhf.tools.plan.plan import assumed_of, cluster_of_options, invocation, parsed, parser

if TYPE_CHECKING:
    from openrlhf.tools.plan.estimate import Assumed
    from openrlhf.tools.plan.hardware import Cluster


def make_parser() -> ArgumentParser:
    own = parser("openrlhf rehearse", __doc__)
    own.add_argument("--json", action="store_true", help="print the result as JSON")
    own.add_argument("--keep", action="store_true", help="keep the folder with the logs and the models")
    return own


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        options, command, flags = parsed(make_parser(), argv)
        catch_signals()
        is_named = options.cluster is not None
        config, cluster = run_on(command, flags, cluster_of_options(options), is_named=is_named)
        choose_hub(config.use_ms)
        folder = Path(tempfile.mkdtemp(prefix="openrlhf-rehearsal-"))
        try:
            code = run(command, config, cluster, assumed_of(options), folder, as_json=options.json)
        finally:
            if options.keep:
                notify(f"logs and models: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        sys.exit(code)


def run_on(
    command: Command, flags: Sequence[str], cluster: "Cluster", *, is_named: bool
) -> tuple[Any, "Cluster"]:
    """Returns the configuration of the real run, and its hardware. If no cluster is named and this machine
    has no GPU, the hardware is as many H100 as the flags of an RL run ask for, or two for a supervised
    command."""
    from openrlhf.api import resource_demands as demands

    if is_named or cluster.kind.on_gpu:
        return invocation(command, flags, cluster).config, cluster
    if command.name != PPO.name:
        cluster = _gpus(2)
        return invocation(command, flags, cluster).config, cluster
    config = invocation(command, flags, cluster).config
    needed = sum(demands(config).values())
    return config, _gpus(needed) if needed > 1 else cluster


def _gpus(count: int) -> "Cluster":
    from openrlhf.tools.plan.hardware import cluster_of

    cluster = cluster_of(f"{math.ceil(count / 8)}x{min(count, 8)}xH100")
    notify(f"note: the run is planned for {cluster}; set --cluster for other hardware")
    return cluster


def run(
    command: Command,
    config: Any,
    cluster: "Cluster",
    assumed: "Assumed",
    folder: Path,
    *,
    as_json: bool,
) -> int:
    """Rehearses the run in `folder` and prints the result. Returns 0 if nothing failed, else 1."""
    from openrlhf.tools.plan.rehearsal.report import as_data, show
    from openrlhf.tools.plan.rehearsal.stages import Rehearsal

    started = time.monotonic()
    rehearsal = Rehearsal(
        command=command,
        config=config,
        cluster=cluster,
        assumed=assumed,
        folder=folder,
        tell=Progress(started),
    )
    rehearsal.run()
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(as_data(rehearsal, seconds), indent=2))
    else:
        show(rehearsal, seconds, sys.stdout)
    return 1 if rehearsal.failed else 0


EVERY = 15.0
"""Minimum seconds between two progress lines of a stage."""


class Progress:
    """Prints the current stage and its remaining time on stderr."""

    def __init__(self, started: float) -> None:
        self.started, self.said = started, 0.0

    def __call__(self, name: str, seconds: float, expected: float) -> None:
        now = time.monotonic()
        if seconds and now - self.said < EVERY:
            return
        self.said = now
        left = f", about {max(expected - seconds, 1):.0f} s left" if seconds < expected else ""
        of_stage = f" ({seconds:.0f} s{left})" if expected else ""
        print(f"[{now - self.started:4.0f} s] {name}{of_stage}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
