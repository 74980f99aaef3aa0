"""The figures of the README: what `openrlhf demo` reaches over several seeds on this machine.

Runs the demo once for each seed, as a user would, and reads the evaluations before and after RL from its run
folder. Prints a row for each seed and the ranges over them, and the machine.

    python benchmarks/demo.py
    python benchmarks/demo.py --seeds 0 1 2 --steps 30 --folder demo
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import cast

from openrlhf.observability.journal import journal_steps, read_journal
from openrlhf.types import Trajectory

LIMIT = 3600
"""Seconds after which a demo is stopped."""
FIGURES: Mapping[str, tuple[Callable[[Trajectory], float], float, str]] = {
    "accuracy": (lambda trajectory: cast(float, trajectory.reward), 100, " %"),
    "answers with reasoning": (lambda trajectory: trajectory.extra_logs["thinks"], 100, " %"),
    "tokens per answer": (lambda trajectory: trajectory.num_actions, 1, ""),
}
"""Name of a figure -> its value of a sample, a factor, and the unit after that factor."""


def main() -> None:
    options = parse_options()
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    print(f"{machine()}; {options.steps} RL steps")
    print(f"{'seed':<5} {'seconds':>8}  before RL -> after")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for seed in options.seeds:
            seconds = run_demo(folder, seed, options.steps)
            rollouts = folder / f"seed{seed}" / "run" / "rollouts"
            evaluations = journal_steps(rollouts, "eval")
            before.append(figures(read_journal(evaluations[0])))
            after.append(figures(read_journal(evaluations[options.steps])))
            pairs = (
                f"{name} {before[-1][name]:.1f} -> {after[-1][name]:.1f}{FIGURES[name][2]}"
                for name in FIGURES
            )
            print(f"{seed:<5} {seconds:>8.0f}  {', '.join(pairs)}", flush=True)
    print(f"\n| over seeds {' '.join(map(str, options.seeds))} | before RL | after {options.steps} steps |")
    print("|---|---|---|")
    for name in FIGURES:
        print(f"| {name} | {spread(before, name)} | {spread(after, name)} |")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=30, help="RL steps (default: 30)")
    parser.add_argument("--folder", type=Path, help="keep the models and runs here")
    return parser.parse_args()


def machine() -> str:
    """Returns the CPU model, the number of usable cores and the load."""
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name\s*: (.*)$", cpus.read_text() if cpus.exists() else "")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{found[1] if found else 'unknown CPU'}, {cores} cores, load {load:.1f} at the start"


def run_demo(folder: Path, seed: int, steps: int) -> float:
    """Runs the demo and returns its seconds. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log, started = folder / f"seed{seed}.log", time.monotonic()
    command = [sys.executable, "-m", "openrlhf.cli.main", "demo", "--folder", str(folder)]
    with log.open("w") as file:
        ended = subprocess.run(
            [*command, "--seed", str(seed), "--steps", str(steps)],
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    if ended.returncode:
        raise RuntimeError(f"the demo with seed {seed}: exit {ended.returncode}\n{log.read_text()[-3000:]}")
    return time.monotonic() - started


def figures(samples: list[Trajectory]) -> dict[str, float]:
    """Returns the mean of each figure over the samples of an evaluation."""
    return {name: factor * fmean(map(read, samples)) for name, (read, factor, _) in FIGURES.items()}


def spread(seeds: list[dict[str, float]], name: str) -> str:
    """Returns the smallest and the largest value over seeds, rounded as in the README."""
    low, high = (round(pick(seed[name] for seed in seeds)) for pick in (min, max))
    return f"{low}{FIGURES[name][2]}" if low == high else f"{low} to {high}{FIGURES[name][2]}"


if __name__ == "__main__":
    main()
