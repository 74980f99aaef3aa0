"""Chooses rows of the user's datasets for a rehearsal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.api import BadRow, PPOConfig, is_gym, load_rows, split_spec
from openrlhf.tools.plan.rehearsal.settings import STEPS

READ = 256
"""Number of rows at the beginning of a dataset from which those of the rehearsal are chosen."""


def rows_for(config: Any, folder: Path) -> dict[str, Any]:
    """Writes short rows of the training data to `folder`. Returns the flags with which the rehearsal reads
    them. `config`: the rehearsal's. Rows with images are not copied; the rehearsal reads the first ones of
    the dataset."""
    data = config.data
    if isinstance(config, PPOConfig):
        count = STEPS * config.rollout.batch_size
        changes = {"data.max_samples": count}
        if not config.reads_images:
            changes |= _chosen(config, "prompt_dataset", "prompt_probs", "prompt_split", count, folder)
        if data.pretrain_dataset:
            texts = STEPS * config.samples_per_step * config.train.max_epochs
            changes |= _chosen(config, "pretrain_dataset", "pretrain_probs", "pretrain_split", texts, folder)
        return changes
    count = STEPS * config.train.batch_size
    names = ("dataset", "dataset_probs", "dataset_split")
    chosen = {} if data.reads_images else _chosen(config, *names, count, folder)
    return chosen | {"data.max_samples": count}


def _chosen(config: Any, name: str, probs: str, split: str, count: int, folder: Path) -> dict[str, Any]:
    data = config.data
    if any(map(is_gym, split_spec(getattr(data, name)))):  # its verifier only knows its own problems
        return {}
    rows = load_rows(
        getattr(data, name),
        flag=f"--data.{name}",
        required_columns={},
        probs=getattr(data, probs),
        split=getattr(data, split),
        max_samples=READ,
        seed=config.train.seed,
        bad_rows="skip",
    )
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in _readable(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{lines[i]}\n" for i in short_ones(list(map(len, lines)), count)), "utf-8")
    return {f"data.{name}": str(file), f"data.{probs}": None}


def _readable(rows: Any) -> list[Any]:
    """Returns the rows that can be read. The others are found by `openrlhf check`."""
    found = []
    for i in range(len(rows)):
        try:
            found.append(rows[i])
        except BadRow:
            continue
    return found


def short_ones(lengths: Sequence[int], count: int) -> list[int]:
    """Returns the indices of `count` short rows, in order: the rows from the first quartile of the lengths
    on, because the shortest rows are often empty or unusual."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    start = max(0, min(len(order) // 4, len(order) - count))
    return sorted(order[start : start + count])
