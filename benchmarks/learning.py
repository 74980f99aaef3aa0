"""Learning curves of RL: mean reward against samples, over several seeds, for the ways of `rl_step.py` that
learn.

Every way trains the demo's policy, after its supervised phases, on the same problems with the same learning
rate, batch and group size. A reward belongs to the policy that sampled, so a curve of samples that are one
step old lies one step behind even if nothing is lost.

    python benchmarks/learning.py --seeds 3 --steps 20
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from rl_step import AHEAD, Run, in_process, prepare

WAYS = ("ours", *AHEAD, "trl")


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        setting = prepare(options, options.folder or Path(folder))
        runs: dict[str, list[Run]] = {way: [] for way in options.modes}
        for seed in range(options.seeds):
            for way, done in runs.items():
                of_seed = replace(setting, seed=seed, learning_rate=options.learning_rate)
                done.append(in_process(way, of_seed, options.threads))
    report(options, runs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", default=list(WAYS), choices=WAYS, help="ways to run (default: all)"
    )
    parser.add_argument("--model", default="tiny", choices=["tiny"], help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument(
        "--target",
        type=float,
        default=0.9,
        help="mean reward; the table shows the first step that reaches it",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--every", type=int, default=4, help="number of steps that a row of the table averages over"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the policy, so that it is trained once"
    )
    parser.add_argument("--sft_rows", type=int, default=20_000, help="rows that the policy learns from")
    parser.set_defaults(warmup=1)
    return parser.parse_args()


def report(options: argparse.Namespace, runs: dict[str, list[Run]]) -> None:
    """Prints the mean over seeds of the mean reward since the row above, and the spread of seeds."""
    print(f"{'samples':>8}" + "".join(f"{way:>22}" for way in runs))
    for end in range(options.every, options.steps + 1, options.every):
        cells = [
            curve_cell([run.rewards[end - options.every : end] for run in done]) for done in runs.values()
        ]
        print(f"{end * options.prompts * options.samples:8}" + "".join(f"{cell:>22}" for cell in cells))
    cells = [curve_cell([run.rewards for run in done]) for done in runs.values()]
    print(f"{'all':>8}" + "".join(f"{cell:>22}" for cell in cells))
    reached = [
        f"{statistics.mean(steps_until(options.target, run.rewards) for run in done):.1f}"
        for done in runs.values()
    ]
    print(f"steps until {options.target:g}: " + ", ".join(map(" ".join, zip(runs, reached, strict=True))))
    seconds = [f"{statistics.median(run.step for run in done):.2f}" for done in runs.values()]
    print(f"{'s / step':>8}" + "".join(f"{cell:>22}" for cell in seconds))


def steps_until(target: float, rewards: list[float]) -> int:
    """Returns the first step whose mean reward is at least the target; one more than the number of steps if
    there is none."""
    return next((step for step, reward in enumerate(rewards, 1) if reward >= target), len(rewards) + 1)


def curve_cell(rewards: list[list[float]]) -> str:
    means = [statistics.mean(of_seed) for of_seed in rewards]
    return f"{statistics.mean(means):.3f} ({min(means):.3f} - {max(means):.3f})"


if __name__ == "__main__":
    main()
