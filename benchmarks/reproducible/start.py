"""Prepares a row: the problems of its task, and the model before RL."""

from pathlib import Path

from rl_step import train_policy

from openrlhf.tasks.prepare import prepare as prepare_words
from reproducible.rows import Row


def prepare(row: Row, seed: int, folder: Path, smollm2: str) -> tuple[str, Path]:
    """Returns (model before RL, folder of the task). What is in `folder` already is not made again."""
    if row.model == "smollm2":
        task = folder / row.task_name
        row.task.write(task, seed)
        return smollm2, task
    if not (folder / "sft" / "model.safetensors").exists():
        train_policy(prepare_words(folder / "task", seed=seed), folder, seed)
    return str(folder / "sft"), folder / "task"
