"""Prepares a row: the problems of its task, and the model before RL."""

from pathlib import Path

from rl_step import train_policy, train_supervised

from openrlhf.tasks.prepare import prepare as prepare_words
from openrlhf.tools.demo.demo import CHAT
from reproducible.rows import Row


def prepare(row: Row, seed: int, folder: Path, smollm2: str) -> tuple[str, Path]:
    """Returns (model before RL, folder of the task). What is in `folder` already is not made again."""
    if row.model == "smollm2":
        start, task = smollm2, folder / row.task_name
        row.task.write(task, seed)
        return start, task
    if not (folder / "sft" / "model.safetensors").exists():
        train_policy(prepare_words(folder / "task", seed=seed), folder, seed)
    if row.task_name == "words":
        return str(folder / "sft"), folder / "task"
    task = folder / row.task_name
    row.task.write(task, seed)
    if not (task / "start" / "model.safetensors").exists():
        train_supervised(
            f"--model.model_name_or_path {folder / 'base'} --data.dataset {task / 'demonstrations.jsonl'} "
            f"--data.output_key output --data.apply_chat_template --ckpt.output_dir {task / 'start'} "
            f"--train.seed {seed} {CHAT}"
        )
    return str(task / "start"), task
