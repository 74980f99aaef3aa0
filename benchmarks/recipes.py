"""Curves and times of the recipes of `openrlhf init`, on the task of the demo and without a GPU.

Trains the base of the demo once. Then, for each recipe: writes its configuration with `openrlhf init`, times
`openrlhf check` and `openrlhf rehearse` on it, trains, and prints the curve of the metric that tells whether
the recipe works. The recipes' learning rates are those of large models; the tiny model gets larger ones as
flags, which are printed.

    python benchmarks/recipes.py
    python benchmarks/recipes.py --recipes sft dpo --folder recipes
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from openrlhf.tasks.prepare import TaskFiles, prepare, write_rows
from openrlhf.tasks.word_problem import Problem, make_problems, solution, write_answer
from openrlhf.tools.demo.demo import CHAT, PRETRAIN, SFT_FLAGS

PARTS = 5
"""Number of points of a printed curve; each is the mean of a fifth of the run."""
LIMIT = 1800
"""Seconds after which a command is stopped."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe on the tiny model."""

    data: str
    """Name of its file among those that `write_data` writes."""
    metric: str
    flags: str
    """Flags beside the recipe's configuration."""
    reward: str = ""


RL_FLAGS = "--actor.adam.lr 5e-4 --rollout.batch_size 16 --train.batch_size 64 --rollout.max_new_tokens 48"
TRIALS = {
    "sft": Trial("sft", "sft/loss", "--adam.lr 1e-3"),
    "dpo": Trial("pairs", "dpo/accuracy", "--adam.lr 1e-4"),
    "kto": Trial("answers", "kto/loss", "--adam.lr 1e-4"),
    "rm": Trial("pairs", "rm/accuracy", "--adam.lr 1e-3"),
    "rl": Trial("prompts", "rollout/reward_mean", f"{RL_FLAGS} --train.max_steps 30", reward="verifier"),
    "rl_rm": Trial("prompts", "rollout/reward_mean", f"{RL_FLAGS} --train.max_steps 30", reward="rm"),
}
"""Trials by name of the recipe. `rl_rm` takes the reward model that `rm` trained before it."""


def main() -> None:
    options = parse_options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        files = prepare(folder / "task", seed=0)
        base = train_base(folder, files)
        data = write_data(folder, files)
        print(f"{'recipe':<7} {'check':>7} {'rehearse':>9} {'run':>6}  curve, in fifths of the run")
        for name in options.recipes:
            print(row(name, folder, base, data, files), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=TRIALS, default=list(TRIALS), help="default: all")
    parser.add_argument("--folder", type=Path, help="keep the base, the data and the runs here")
    options = parser.parse_args()
    if "rl_rm" in options.recipes and "rm" not in options.recipes:
        parser.error("--recipes rl_rm: needs the reward model of rm; name rm before it")
    return options


def train_base(folder: Path, files: TaskFiles) -> Path:
    """Trains the model from which the demo's RL starts, if the folder has none yet."""
    chat = folder / "chat"
    if not (chat / "config.json").exists():
        openrlhf(
            f"sft --model.model_name_or_path {files.model} --model.pretrain_mode_enable "
            f"--data.dataset {files.pretrain} --ckpt.output_dir {folder / 'base'} {PRETRAIN} {SFT_FLAGS}",
            folder / "base.log",
        )
        openrlhf(
            f"sft --model.model_name_or_path {folder / 'base'} --data.dataset {files.sft} "
            f"--data.output_key output --data.apply_chat_template --ckpt.output_dir {chat} "
            f"{CHAT} {SFT_FLAGS}",
            folder / "chat.log",
        )
    return chat


def write_data(folder: Path, files: TaskFiles) -> dict[str, Path]:
    """Writes pairs and single answers to the problems, and returns all data by name."""
    rng = random.Random(0)
    problems = make_problems(2_048, seed=1)
    pairs = [
        {
            "prompt": [{"role": "user", "content": problem.question}],
            "chosen": [{"role": "assistant", "content": solution(problem, careful=True)}],
            "rejected": [{"role": "assistant", "content": wrong_answer(problem, rng)}],
        }
        for problem in problems
    ]
    answers = [
        {
            "prompt": problem.question,
            "completion": solution(problem, careful=True) if right else wrong_answer(problem, rng),
            "label": right,
        }
        for problem in problems
        for right in [rng.random() < 0.5]
    ]
    return {
        "sft": write_rows(folder / "answers_of_sft.jsonl", sft_rows(files)),
        "prompts": write_rows(folder / "problems.jsonl", rl_rows(files)),
        "pairs": write_rows(folder / "pairs.jsonl", pairs),
        "answers": write_rows(folder / "answers.jsonl", answers),
    }


def sft_rows(files: TaskFiles) -> Iterator[dict[str, str]]:
    for line in files.sft.read_text().splitlines():
        row = json.loads(line)
        yield {"prompt": row["input"], "response": row["output"]}


def rl_rows(files: TaskFiles) -> Iterator[dict[str, str]]:
    for line in files.prompts.read_text().splitlines():
        row = json.loads(line)
        yield {"prompt": row["input"], "answer": row["label"]}


def wrong_answer(problem: Problem, rng: random.Random) -> str:
    """Returns an answer with a wrong number, with or without a calculation."""
    left, _, result = problem.steps[-1].partition("=")
    wrong = str(int(result) + rng.choice((1, 2, 10)))
    if rng.random() < 0.5:
        return write_answer((*problem.steps[:-1], f"{left}={wrong}"))
    return f"<think></think>\\boxed{{{wrong}}}"


def row(name: str, folder: Path, base: Path, data: dict[str, Path], files: TaskFiles) -> str:
    """Runs a recipe and returns its line of the table."""
    trial, work = TRIALS[name], folder / name
    work.mkdir(exist_ok=True)
    config, output = work / "run.yaml", work / "model"
    config.unlink(missing_ok=True)
    answers = f"--what {name} --model {base} --data {data[trial.data]} --gpus 0 --output {output} --yes"
    reward = {"verifier": files.reward, "rm": folder / "rm" / "model"}.get(trial.reward)
    openrlhf(f"init {answers} --file {config}" + f" --reward {reward}" * bool(reward), work / "init.log")
    command = {"rl": "ppo", "rl_rm": "ppo"}.get(name, name)
    flags = f"{trial.flags} --ckpt.overwrite --logger.run_dir {work / 'run'}"
    seconds = [
        openrlhf(f"check {command} {config} {flags}", work / "check.log"),
        openrlhf(f"rehearse {command} {config} {flags}", work / "rehearse.log"),
        openrlhf(f"{command} --config {config} {flags}", work / "run.log"),
    ]
    check, rehearse, run = (f"{s:.0f} s" for s in seconds)
    points = "  ".join(f"{value:.3g}" for value in curve(work / "run" / "metrics.jsonl", trial.metric))
    return f"{name:<7} {check:>7} {rehearse:>9} {run:>6}  {trial.metric} {points}   ({trial.flags})"


def openrlhf(arguments: str, log: Path) -> float:
    """Runs a command and returns its seconds. Raises RuntimeError if it fails; `log` has its output."""
    program = Path(sys.executable).with_name("openrlhf")
    started = time.monotonic()
    with log.open("w") as file:
        ended = subprocess.run(
            [program, *shlex.split(arguments)], stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    if ended.returncode:
        raise RuntimeError(f"openrlhf {arguments}: exit {ended.returncode}\n{log.read_text()[-3000:]}")
    return time.monotonic() - started


def curve(metrics: Path, name: str) -> list[float]:
    """Returns the means of a metric over equal parts of the run."""
    values = [
        row[name]
        for line in metrics.read_text().splitlines()
        if (row := json.loads(line)).get(name) is not None
    ]
    cuts = [round(i * len(values) / PARTS) for i in range(PARTS + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(cuts) if b > a]


if __name__ == "__main__":
    main()
