"""Chooses rows of the user's datasets for a rehearsal."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.api import PPOConfig, is_gym, load_rows, read_each, split_spec
from openrlhf.tools.plan.rehearsal.settings import STEPS

READ = 256
"""Number of rows at the beginning of a dataset from which those of the rehearsal are chosen."""


def rows_for(config: Any, folder: Path) -> dict[str, Any]:
    """Writes short rows of the training data to `folder`. Returns the flags with which the rehearsal reads
    them. `config`: the rehearsal's. Rows with images are not copied; the rehearsal reads the first ones of
    the dataset."""
    data = config.data
    if not isinstance(config, PPOConfig):
        count = STEPS * config.train.batch_size
        chosen = {} if data.reads_images else _chosen(config, "dataset", count, folder)
        return chosen | {"data.max_samples": count}
    count = STEPS * config.rollout.batch_size
    changes = {"data.max_samples": count}
    if not config.reads_images:
        changes |= _chosen(config, "prompt_dataset", count, folder)
    if data.pretrain_dataset:
        texts = STEPS * config.samples_per_step * config.train.max_epochs
        changes |= _chosen(config, "pretrain_dataset", texts, folder)
    return changes


def _chosen(config: Any, name: str, count: int, folder: Path) -> dict[str, Any]:
    data, stem = config.data, name.removesuffix("_dataset")
    if any(map(is_gym, split_spec(getattr(data, name)))):  # its verifier only knows its own problems
        return {}
    rows = load_rows(
        getattr(data, name),
        flag=f"--data.{name}",
        required_columns={},
        probs=getattr(data, f"{stem}_probs"),
        split=getattr(data, f"{stem}_split"),
        max_samples=READ,
        seed=config.train.seed,
        bad_rows="skip",
    )
    usable = read_each(rows, dict, "skip", Counter())
    lines = [json.dumps(row, ensure_ascii=False, default=str) for _, row in usable]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{lines[i]}\n" for i in short_ones(list(map(len, lines)), count)), "utf-8")
    return {f"data.{name}": str(file), f"data.{stem}_probs": None}


def short_ones(lengths: Sequence[int], count: int) -> list[int]:
    """Returns the indices of `count` short rows, in order: the rows from the first quartile of the lengths
    on, because the shortest rows are often empty or unusual."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    start = max(0, min(len(order) // 4, len(order) - count))
    return sorted(order[start : start + count])
