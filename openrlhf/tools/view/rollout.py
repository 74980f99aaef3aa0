"""Returns one rollout in full: its facts, and the numbers by which each token of its answer is coloured."""

import difflib
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from openrlhf.api import (
    JOURNAL_FILE,
    ErrorCode,
    ImageSources,
    UsageError,
    decoded,
    kept_download,
    load_image,
    png,
    read_label,
    read_rows,
)
from openrlhf.tools.command_line.runs import PlacedRun
from openrlhf.tools.view.index import Index
from openrlhf.tools.view.rollouts import prompt_length

Row = dict[str, Any]
TokenTexts = Callable[[Path, Row], list[str]]
"""Function (run folder, row) -> the text of each token after the prompt. Raises ValueError, with the reason,
if the run's tokenizer cannot be used."""

MOST_WORDS = 3000
"""Maximum number of words of each text that a diff compares."""

FACTS = (
    *("prompt_id", "epoch", "sample_index", "part", "seed", "source", "label", "prompt", "response"),
    *("reward", "score", "outcome", "error", "finish_reason", "truncated", "extra_logs"),
    *("extra_texts", "turn_rewards"),
    *("weight_versions", "optimizer_steps", "ranks", "images"),
)
"""Columns that the page shows unchanged."""


def read_row(index: Index, run: int, file: str, row: int) -> Row:
    """Returns all columns of a row of the journal, by their current names. Raises UsageError if there is no
    such row."""
    known = run < len(index.runs) and file in index.runs[run].known
    if not known or not JOURNAL_FILE.fullmatch(file):
        raise UsageError(ErrorCode.NOT_FOUND, "the run has no such journal file", value=file)
    if not index.rows("SELECT 1 FROM rollouts WHERE run = ? AND file = ? AND row = ?", [run, file, row]):
        raise UsageError(ErrorCode.NOT_FOUND, f"the file has no row {row}", value=file)
    (found,) = read_rows(index.runs[run].folder.rollouts_path / file, [row])
    label = read_label(found)
    return found | {"label": label if label is None or isinstance(label, str) else found["label"]}


def shown(row: Row) -> dict[str, Any]:
    facts = {name: row.get(name) for name in FACTS}
    # JavaScript's numbers cannot hold all 64-bit integers.
    facts["seed"] = None if facts["seed"] is None else str(facts["seed"])
    start = prompt_length(row)
    return facts | {
        "prompt_tokens": start,
        "token_ids": row["token_ids"][start:],
        "tracks": tracks(row),
    }


def tracks(row: Row) -> dict[str, list[float | None]]:
    """Returns quantity -> its value for each token after the prompt, None for tokens that the policy did not
    choose. Quantities that need a column that the journal lacks are left out."""
    start = prompt_length(row)
    places = [i - start for r in row["action_ranges"] for i in range(r["start"], r["end"])]
    size, turns = len(row["token_ids"]) - start, sorted(row["turn_starts"])
    sampler, trainer, reference = (
        row.get(name) for name in ("rollout_log_probs", "log_probs", "ref_log_probs")
    )
    of_actions: dict[str, Sequence[float] | None] = {
        "probability": sampler and [math.exp(min(0.0, p)) for p in sampler],
        "surprisal": sampler and [-p for p in sampler],
        "gap": _difference(trainer, sampler),
        "reference": _difference(trainer, reference),
        **{name: row.get(name) for name in ("advantages", "values", "returns")},
        "version": list(
            chain.from_iterable(repeat(r["version"], r["count"]) for r in row["weight_versions"])
        ),
        "turn": [bisect_right(turns, start + place) for place in places],
    }
    return {name: _placed(values, places, size) for name, values in of_actions.items() if values}


def _difference(first: Sequence[float] | None, second: Sequence[float] | None) -> list[float] | None:
    return [a - b for a, b in zip(first, second, strict=True)] if first and second else None


def _placed(values: Sequence[float], places: Sequence[int], size: int) -> list[float | None]:
    whole: list[float | None] = [None] * size
    for place, value in zip(places, values, strict=True):
        whole[place] = value
    return whole


def diff(first: str, second: str) -> dict[str, Any]:
    """Compares two texts word by word. Returns {"parts": [[kind, text], ...], "cut": True if a text has more
    than MOST_WORDS words}. A kind is "same", "removed" (only in the first text) or "added"."""
    a, b = (re.findall(r"\S*\s|\S+", text) for text in (first, second))  # with the white space after them
    parts: list[list[str]] = []
    matcher = difflib.SequenceMatcher(None, a[:MOST_WORDS], b[:MOST_WORDS])
    for kind, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if kind == "equal":
            parts.append(["same", "".join(a[a_start:a_end])])
            continue
        if removed := "".join(a[a_start:a_end]):
            parts.append(["removed", removed])
        if added := "".join(b[b_start:b_end]):
            parts.append(["added", added])
    return {"parts": parts, "cut": max(len(a), len(b)) > MOST_WORDS}


def picture(folder: Path, reference: str) -> bytes:
    """Returns a picture of a rollout as PNG, from the run's image folder or from the cache of downloads;
    fetches nothing. Raises UsageError if the picture is not there or cannot be decoded."""
    if "://" in reference:
        kept = kept_download(reference)
        root, name = kept.parent, kept.name
    else:
        root, name = image_root(folder), reference
    return png(decoded(load_image(name, ImageSources(root=root)).data))


def image_root(folder: Path) -> Path | None:
    """Returns the folder that the run's image paths are relative to: `data.image_root` of its configuration,
    or else the folder of `data.prompt_dataset`."""
    run = PlacedRun(folder)
    if root := run.flags.get("data.image_root"):
        return Path(run.locate(root))
    prompts = Path(run.locate(run.flags.get("data.prompt_dataset") or ""))
    return prompts if prompts.is_dir() else prompts.parent
