"""Prepares a row: the problems of its task, and the model before RL."""

from pathlib import Path

from rl_step import train_policy, train_supervised

from openrlhf.tasks.prepare import prepare as prepare_words
from reproducible.rows import Row

SFT = (
    "--data.output_key output --data.apply_chat_template --train.batch_size 16 "
    "--train.micro_batch_size 16 --train.max_epochs 1 --adam.lr 3e-3"
)


def prepare(row: Row, seed: int, folder: Path, smollm2: str) -> tuple[str, Path]:
    """Returns (model before RL, folder of the task). What is in `folder` already is not made again."""
    if row.model == "smollm2":
        task = folder / row.task_name
        row.task.write(task, seed)
        return smollm2, task
    if not (folder / "sft" / "model.safetensors").exists():
        train_policy(prepare_words(folder / "task", seed=seed), folder, seed)
    if row.task.demonstrate is None:
        return str(folder / "sft"), folder / "task"
    task, model = folder / row.task_name, folder / f"sft_{row.task_name}"
    if not (model / "model.safetensors").exists():
        row.task.write(task, seed)
        row.task.write_demonstrations(task / "sft.jsonl", seed)
        train_supervised(
            f"--model.model_name_or_path {folder / 'base'} --data.dataset {task / 'sft.jsonl'} "
            f"--ckpt.output_dir {model} --train.seed {seed} --data.max_len {row.task.max_len} {SFT}"
        )
    return str(model), task
