"""Builder of run folders for tests of what reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from openrlhf.observability.rollout_table import SCHEMA

SAMPLE = {
    "prompt_id": 0,
    "epoch": 0,
    "sample_index": 0,
    "part": 0,
    "seed": 0,
    "source": "default",
    "label": "null",
    "prompt": "",
    "response": "",
    "images": [],
    "reward": 0.0,
    "score": 0.0,
    "outcome": "ok",
    "error": "",
    "finish_reason": "stop",
    "truncated": False,
    "extra_logs": [],
    "extra_texts": [],
    "turn_starts": [],
    "turn_rewards": [],
}


def sample(
    token_ids: Sequence[int], prompt_length: int = 1, version: int = 0, **changes: Any
) -> dict[str, Any]:
    """Returns a row of a journal. Log-probs of the sampler are -1 unless given."""
    count = len(token_ids) - prompt_length
    return {
        **SAMPLE,
        "token_ids": list(token_ids),
        "action_ranges": [{"start": prompt_length, "end": len(token_ids)}],
        "weight_versions": [{"version": version, "count": count}],
        "rollout_log_probs": [-1.0] * count,
        **changes,
    }


def write_journal(run: Path, step: int, samples: Sequence[Mapping[str, Any]], name: str = "step") -> None:
    """Writes the rollouts of a step."""
    rows = [dict.fromkeys(SCHEMA.names) | dict(row) for row in samples]
    schema = SCHEMA.with_metadata({b"num_samples": str(len(rows))})
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), run / "rollouts" / f"{name}_{step:06d}.parquet")


def write_run(run: Path, metrics: Mapping[str, Sequence[float | None]], **config: Any) -> Path:
    """Writes the metrics of steps 1, 2, ... (None: the step does not report the metric) and a configuration,
    given as flags with `__` for dots."""
    run.mkdir(parents=True, exist_ok=True)
    steps = range(max(map(len, metrics.values()), default=0))
    rows = (
        {"step": i + 1, **{name: v[i] for name, v in metrics.items() if i < len(v) and v[i] is not None}}
        for i in steps
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {}
    for flag, value in config.items():
        *sections, last = flag.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    return run
