"""Loads metrics and rollouts of a run as pandas tables, for notebooks."""

from collections.abc import Container, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pandas import DataFrame

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.journal import read_table
from openrlhf.observability.rollout_table import FACTS
from openrlhf.observability.run_index import RunIndex


def metrics_to_pandas(run: str | Path) -> DataFrame:
    """Returns the metrics of a run, with one row per step (the index) and one column per metric. A metric
    that a step does not have is NaN. Raises UsageError if the folder has no metrics.jsonl."""
    metrics = RunIndex(Path(run)).metrics()
    return pd.DataFrame.from_dict(metrics, orient="index").sort_index().rename_axis("step")


def rollouts_to_pandas(
    run: str | Path,
    *,
    name: str = "step",
    steps: Container[int] | None = None,
    columns: Sequence[str] = FACTS.names,
) -> DataFrame:
    """Returns the rollouts of a run in the order of steps, one row per rollout, with a column `step`. Raises
    UsageError if there are no such rollouts.

    Args:
        run: run folder.
        name: `step` for training, `eval` or `filtered`.
        steps: steps to read; None for all.
        columns: columns of the journal, by default those with a few values per rollout. The columns of tokens
            take much more memory.
    """
    files = RunIndex(Path(run)).rollouts(name)
    chosen = {step: path for step, path in files.items() if steps is None or step in steps}
    if not chosen:
        text = f"has no rollouts {name}_N of these steps; it has {sorted(files) or 'none'}"
        raise UsageError(ErrorCode.NOT_FOUND, text, value=run)
    tables = []
    for step, path in chosen.items():
        table = read_table(path, columns).replace_schema_metadata()
        tables.append(table.add_column(0, "step", pa.array([step] * len(table), pa.int64())))
    return pa.concat_tables(tables, promote_options="default").to_pandas()
