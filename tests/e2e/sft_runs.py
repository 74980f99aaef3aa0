"""SFT runs of six steps that differ in ranks, backend or checkpoint, and how far apart they may be."""

import shlex
from pathlib import Path

from processes import run_ranks

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.types import Metrics

PRECISION = 10 * 2**-24
"""Tolerance of float32 weights and losses for each token of a step. A gradient, of norm 1 at most, is a sum
over tokens in another order; Adam turns its error into one of up to lr / eps = 10 times as much in a
weight."""
TOKENS = 8 * 128
"""Upper bound of the tokens of a step."""


def flags(task: TaskFiles) -> str:
    return (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.apply_chat_template --data.max_len 128 --data.max_samples 22 --train.batch_size 8 "
        "--train.micro_batch_size 2 --train.max_epochs 2 --adam.lr 1e-2 --adam.eps 1e-3 "
    )


def train(task: TaskFiles, folder: Path, name: str, num_ranks: int, more: str) -> dict[int, Metrics]:
    """Trains with these ranks and further flags, saves every second step into one folder for all runs, and
    returns the metrics of each step."""
    command = (
        f"openrlhf.cli.train_sft {flags(task)} --ckpt.path {folder}/ckpt --ckpt.save_steps 2 "
        f"--ckpt.output_dir {folder}/{name} --logger.run_dir {folder}/{name}/run {more}"
    )
    run_ranks(shlex.split(command), num_ranks, log=folder / f"{name}.log")
    return read_metrics(folder / name / "run" / "metrics.jsonl")
