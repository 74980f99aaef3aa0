"""Converts trajectories to table columns, and back. A row has:

    prompt_id, epoch, sample_index, part, seed, source   origin of the trajectory
    label, label_is_json                                   text as it is, anything else as JSON
    prompt, response                                       text; response is null without a decoder
    images                                                 name of each image, without its content
    reward, score, outcome, error, finish_reason, truncated
    extra_logs, extra_texts                                [{name, value}, ...]
    token_ids                                              [L]
    action_ranges                                          [{start, end}, ...] of actions in token_ids
    turn_starts                                            [T] index in token_ids of each turn's first action
    turn_rewards                                           [T] reward of each turn; empty: unknown
    weight_versions                                        [{version, count}, ...] adding up to A
    rollout_log_probs                                      [A] log-probs of the sampler
    kept_ids, kept_counts, kept_log_masses                 `Nuclei`; null: the whole vocabulary
    likely_ids, likely_log_probs                           [A * K] `LIKELY`, action after action; null: none
    log_probs, ref_log_probs, values, advantages, returns  [A] null where not computed
    optimizer_steps, ranks                                 of each update on it, by epoch; null: no update

The routing of experts is not stored. Lone surrogates, which UTF-8 cannot encode, are escaped in texts and
kept in labels."""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from openrlhf.observability.run_folder import LABEL_FORM, RENAMED_COLUMNS, plain, read_jsonl, read_label
from openrlhf.types import LIKELY, Batch, Image, Nuclei, Outcome, Prompt, Trajectory, not_none

Visits = Sequence[Sequence[tuple[int, int]]]
"""For each sequence, by epoch: (optimizer step that trained on it, rank)."""

_INT = pa.int32()
_FLOATS = pa.list_(pa.float32())
FACTS = pa.schema(
    {
        "prompt_id": pa.int64(),
        "epoch": pa.int64(),
        "sample_index": _INT,
        "part": _INT,
        "seed": pa.uint64(),
        "source": pa.string(),
        "label": pa.string(),
        LABEL_FORM: pa.bool_(),
        "prompt": pa.string(),
        "response": pa.string(),
        "images": pa.list_(pa.string()),
        "reward": pa.float64(),
        "score": pa.float64(),
        "outcome": pa.string(),
        "error": pa.string(),
        "finish_reason": pa.string(),
        "truncated": pa.bool_(),
        # A list, because `datasets` cannot read maps.
        "extra_logs": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})),
        "extra_texts": pa.list_(pa.struct({"name": pa.string(), "value": pa.string()})),
    }
)
"""Columns with a few values per sample."""
ARRAYS = pa.schema(
    {
        "token_ids": pa.list_(_INT),
        "action_ranges": pa.list_(pa.struct({"start": _INT, "end": _INT})),
        "turn_starts": pa.list_(_INT),
        "turn_rewards": _FLOATS,
        "weight_versions": pa.list_(pa.struct({"version": _INT, "count": _INT})),
        "rollout_log_probs": _FLOATS,
    }
)
KEPT = pa.schema({"kept_ids": pa.list_(_INT), "kept_counts": pa.list_(_INT), "kept_log_masses": _FLOATS})
"""Columns of the top-p/top-k nucleus: the fields of `Nuclei` with the prefix `kept_`."""
LIKELY_TOKENS = pa.schema({"likely_ids": pa.list_(_INT), "likely_log_probs": _FLOATS})
ADDED = ("turn_rewards", "images", "extra_texts", LABEL_FORM, *KEPT.names, *LIKELY_TOKENS.names)
"""Columns that journals of earlier versions lack."""
OF_ACTIONS = ("log_probs", "ref_log_probs", "values", "advantages", "returns")
"""Columns of a `Batch` with one value per action."""
TRAINED = pa.schema(
    {**dict.fromkeys(OF_ACTIONS, _FLOATS), "optimizer_steps": pa.list_(_INT), "ranks": pa.list_(_INT)}
)
SCHEMA = pa.unify_schemas([FACTS, ARRAYS, KEPT, LIKELY_TOKENS, TRAINED])


def to_table(
    trajectories: Sequence[Trajectory],
    responses: Sequence[str | None],
    batch: Batch | None = None,
    visits: Visits = (),
) -> pa.Table:
    """Builds the table of a step. `batch`, `visits`: training data of the finished trajectories, in their
    order; None and empty if nothing is trained on them."""
    columns = _facts(trajectories, responses) | _arrays(trajectories)
    columns |= _kept(trajectories) | _likely(trajectories)
    if batch is not None:
        columns |= _trained([t.ok for t in trajectories], batch, visits)
    nulls = {f.name: pa.nulls(len(trajectories), f.type) for f in SCHEMA if f.name not in columns}
    return pa.table(columns | nulls).select(SCHEMA.names).cast(SCHEMA)


def as_of_today(table: pa.Table, written: Container[str]) -> pa.Table:
    """Returns a journal's table with today's columns and labels, which were all JSON in earlier versions.
    `written`: all columns of the journal. Raises ValueError for a column of another type."""
    names = [RENAMED_COLUMNS.get(name, name) for name in table.column_names]
    metadata = table.schema.metadata
    table = table.rename_columns(names)
    if "label" in names and LABEL_FORM not in written:
        labels = _labels([json.loads(label) for label in table["label"].to_pylist()])
        table = table.set_column(names.index("label"), "label", pa.array(labels["label"], pa.string()))
        table = table.append_column(LABEL_FORM, pa.array(labels[LABEL_FORM], pa.bool_()))
    fields = [SCHEMA.field(f.name) if f.name in SCHEMA.names else f for f in table.schema]
    return table.cast(pa.schema(fields, metadata))


def to_trajectories(table: pa.Table) -> list[Trajectory]:
    """Rebuilds trajectories. Their arrays are views of the table's columns."""
    for name in (name for name in ADDED if name not in table.column_names):
        table = table.append_column(name, pa.nulls(len(table), SCHEMA.field(name).type))
    facts = table.select(FACTS.names).to_pylist()
    arrays = zip(*(_split(table[name]) for name in ARRAYS.names), strict=True)
    return [
        replace(_trajectory(row | dict(zip(ARRAYS.names, own, strict=True))), kept=kept, likely=likely)
        for row, own, kept, likely in zip(facts, arrays, _nuclei(table), _tokens(table), strict=True)
    ]


def _nuclei(table: pa.Table) -> list[Nuclei | None]:
    """Returns the top-p/top-k nucleus of each row; None for the whole vocabulary."""
    missing = table[KEPT.names[0]].is_null().to_pylist()
    sets = zip(*(_split(table[name]) for name in KEPT.names), strict=True)
    return [
        None if is_missing else Nuclei(ids=ids, counts=counts, log_masses=log_masses)
        for is_missing, (ids, counts, log_masses) in zip(missing, sets, strict=True)
    ]


def _tokens(table: pa.Table) -> list[np.ndarray | None]:
    """Returns the likely tokens of each row; None where they were not recorded."""
    found: list[np.ndarray | None] = []
    columns = [_split(table[name]) for name in ("rollout_log_probs", *LIKELY_TOKENS.names)]
    for actions, ids, log_probs in zip(*columns, strict=True):
        tokens = np.empty(len(ids), LIKELY)
        tokens["id"], tokens["log_prob"] = ids, log_probs
        found.append(tokens.reshape(len(actions), -1) if len(ids) else None)
    return found


def table_of_json(path: Path) -> pa.Table:
    """Reads a journal in JSON lines, as earlier versions wrote it. A turn is a range of consecutive
    actions."""
    rows = [
        {RENAMED_COLUMNS.get(name, name): value for name, value in row.items()} for row in read_jsonl(path)
    ]
    return to_table([_trajectory_of_json(row) for row in rows], [row["response"] for row in rows])


def _facts(trajectories: Sequence[Trajectory], responses: Sequence[str | None]) -> dict[str, pa.Array]:
    prompts = [t.prompt for t in trajectories]
    values: dict[str, list] = {
        name: [getattr(record, name) for record in records]
        for records, names in (
            (prompts, ("prompt_id", "epoch", "source")),
            (trajectories, ("sample_index", "part", "seed", "reward", "score", "finish_reason", "truncated")),
        )
        for name in names
    }
    values |= _labels([p.label for p in prompts])
    values["prompt"] = [_text(p.text) for p in prompts]
    values["response"] = [None if text is None else _text(text) for text in responses]
    values["images"] = [[_text(image.reference) for image in t.images] for t in trajectories]
    values["outcome"] = [t.outcome.value for t in trajectories]
    values["error"] = [_text(t.error) for t in trajectories]
    values["extra_logs"] = [
        [{"name": _text(name), "value": value} for name, value in t.extra_logs.items()] for t in trajectories
    ]
    values["extra_texts"] = [
        [{"name": _text(name), "value": _text(text)} for name, text in t.extra_texts.items()]
        for t in trajectories
    ]
    return {f.name: pa.array(values[f.name], f.type) for f in FACTS}


def _labels(labels: Sequence[Any]) -> dict[str, list]:
    """Returns the two columns of labels. Text without lone surrogates is written as it is."""
    as_is = [label is None or (isinstance(label, str) and _text(label) == label) for label in labels]
    texts = [
        label if kept else _text(json.dumps(label, ensure_ascii=False, default=plain))
        for label, kept in zip(labels, as_is, strict=True)
    ]
    return {"label": texts, LABEL_FORM: [not kept for kept in as_is]}


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _arrays(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    parts = {
        name: [getattr(t, name) for t in trajectories] for name in ARRAYS.names if name != "action_ranges"
    }
    parts["action_ranges"] = [_ranges(t.action_mask) for t in trajectories]
    return {f.name: _lists(parts[f.name], f.type) for f in ARRAYS}


def _kept(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    names = {field.name: field.name.removeprefix("kept_") for field in KEPT}
    parts = {name: [t.kept and getattr(t.kept, own) for t in trajectories] for name, own in names.items()}
    return {field.name: _lists(parts[field.name], field.type) for field in KEPT}


def _likely(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    tokens = [t.likely for t in trajectories]
    return {
        field.name: _lists([None if t is None else t[name].ravel() for t in tokens], field.type)
        for field, name in zip(LIKELY_TOKENS, not_none(LIKELY.names), strict=True)
    }


def _ranges(mask: np.ndarray) -> np.ndarray:
    """Returns the ranges [start, end) where `mask` is True, (R, 2)."""
    bordered = np.zeros(len(mask) + 2, bool)
    bordered[1:-1] = mask
    return np.flatnonzero(bordered[1:] != bordered[:-1]).reshape(-1, 2)


def _lists(parts: Sequence[Any], type_: pa.ListType) -> pa.Array:
    """Builds a column with one list per part, null for None. Parts of shape (R, 2) become lists of
    structs."""
    is_pairs = pa.types.is_struct(type_.value_type)
    return pa.array([[*map(tuple, part)] for part in parts] if is_pairs else parts, type_)


def _trained(is_ok: Sequence[bool], batch: Batch, visits: Visits) -> dict[str, pa.Array]:
    """Returns the columns of the training step. They are null for failed samples."""

    def spread(of_finished: Iterable[Any]) -> list[Any]:
        left = iter(of_finished)
        return [next(left) if ok else None for ok in is_ok]

    borders = batch.num_actions.cumsum()[:-1]
    columns = {
        name: _lists(spread(np.split(values, borders)), _FLOATS)
        for name in OF_ACTIONS
        if (values := getattr(batch, name)) is not None
    }
    for i, name in enumerate(("optimizer_steps", "ranks")):
        columns[name] = _lists(spread([visit[i] for visit in own] for own in visits), pa.list_(_INT))
    return columns


def _split(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Splits a list column into its arrays, the inverse of `_lists`."""
    lists = column.combine_chunks()
    values = lists.flatten()
    if pa.types.is_struct(values.type):
        flat = np.stack([part.to_numpy() for part in values.flatten()], axis=1)
    else:
        flat = values.to_numpy()
    ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy())
    return [flat[start:end] for start, end in pairwise([0, *ends])]


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Builds a trajectory from a row with the columns FACTS and, as numpy arrays, ARRAYS."""
    action_mask = np.zeros(len(row["token_ids"]), bool)
    for start, end in row["action_ranges"]:
        action_mask[start:end] = True
    return Trajectory(
        prompt=Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            label=read_label(row),
            source=row["source"],
            epoch=row["epoch"],
        ),
        action_mask=action_mask,
        images=tuple(Image(reference, b"") for reference in row["images"] or ()),
        outcome=Outcome(row["outcome"]),
        extra_logs={log["name"]: log["value"] for log in row["extra_logs"]},
        extra_texts={text["name"]: text["value"] for text in row["extra_texts"] or ()},
        **{name: row[name] for name in _SAME},
    )


_SAME = (
    *("sample_index", "part", "seed", "reward", "score", "error", "finish_reason", "truncated"),
    *("token_ids", "turn_starts", "turn_rewards", "weight_versions", "rollout_log_probs"),
)


def _trajectory_of_json(row: Mapping[str, Any]) -> Trajectory:
    ranges = np.array(row["action_ranges"], np.int32).reshape(-1, 2)
    number = lambda value: None if value is None else float(value)  # NaN is a string in JSON
    return _trajectory(
        {
            **row,
            "part": 0,
            "images": [],
            "extra_texts": [],
            "label": json.dumps(row["label"]),
            "reward": number(row["reward"]),
            "score": number(row["score"]),
            "extra_logs": [{"name": k, "value": float(v)} for k, v in row["extra_logs"].items()],
            "token_ids": np.array(row["token_ids"], np.int32),
            "turn_starts": ranges[:, 0],
            "turn_rewards": np.zeros(0, np.float32),
            "weight_versions": np.array(row["weight_versions"], np.int32).reshape(-1, 2),
            "rollout_log_probs": np.array(row["rollout_log_probs"], np.float32),
        }
    )
