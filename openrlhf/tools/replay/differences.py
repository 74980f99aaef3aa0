"""Compares the records that two runs have of a step, bit for bit and in causal order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

IDENTITY = ("epoch", "prompt_id", "sample_index", "part")
"""Columns that identify a sample."""
BEFORE = ("prompt", "label", "label_is_json", "source", "images", "seed")
"""Columns that exist before a sample is drawn."""
SAMPLING = ("weight_versions", "token_ids", "rollout_log_probs", "action_ranges")
"""Columns with a value per token. Those that differ are sorted by the first token at which they differ, and
for equal tokens by this order."""
AFTER = (
    *("turn_starts", "finish_reason", "truncated", "outcome", "error"),
    *("extra_texts", "extra_logs", "score", "reward"),
)
"""Columns of the finished sample and its reward."""
LEARNING = ("log_probs", "ref_log_probs", "values", "advantages", "returns", "optimizer_steps", "ranks")
"""Columns of the training step."""
SUPPORT = ("kept_ids", "kept_counts", "kept_log_masses", "likely_ids", "likely_log_probs")
"""Columns of the top-p/top-k nucleus, and of the likely tokens."""
COLUMNS = (*IDENTITY, *BEFORE, *SAMPLING, *SUPPORT, *AFTER, "turn_rewards", *LEARNING)
ORDER = "order of the samples"
NUMBER = "number of samples"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The comparison of one quantity of a step."""

    quantity: str
    """A column of the rollouts, a metric, or a tensor of a checkpoint."""
    first: str = ""
    """Place and values of the first difference; "" if all values are equal."""
    number: str = ""
    """Number of compared or differing items, such as "3 of 64 samples"."""
    largest: float | None = None
    """Largest difference of two numbers; None if values are not numbers or differ in length."""

    @property
    def is_equal(self) -> bool:
        return not self.first


def compare_rollouts(a: pa.Table, b: pa.Table, *, kept: bool = False) -> Iterator[Compared]:
    """Yields the comparison of each column of two journals, in causal order. Leaves out columns that one of
    them lacks. `kept`: True if a journal has only a part of the step's samples; the common ones are compared
    then."""
    a, b, problem = _paired(a, b, kept)
    if problem is not None:
        yield problem
        return
    known = [c for c in COLUMNS if c in a.column_names and c in b.column_names]
    for name in _by_token(a, b, known):
        yield _column(name, a, b)


def _paired(a: pa.Table, b: pa.Table, kept: bool) -> tuple[pa.Table, pa.Table, Compared | None]:
    """Returns the samples of both tables in the same order, and their difference if there is one."""
    keys = [list(zip(*(t[name].to_pylist() for name in IDENTITY), strict=True)) for t in (a, b)]
    if kept:
        places = [{key: i for i, key in enumerate(own)} for own in keys]
        common = [key for key in keys[0] if key in places[1]]
        return a.take([places[0][key] for key in common]), b.take([places[1][key] for key in common]), None
    for i, (one, other) in enumerate(zip(*keys, strict=False)):
        if one != other:
            text = f"row {i}: {_named(one)} | {_named(other)}"
            count = sum(x != y for x, y in zip(*keys, strict=False))
            return a, b, Compared(quantity=ORDER, first=text, number=f"{count} of {len(keys[0])} samples")
    if len(keys[0]) != len(keys[1]):
        text = f"{len(keys[0])} | {len(keys[1])}"
        return a, b, Compared(quantity=NUMBER, first=text)
    return a, b, None


def _named(key: tuple) -> str:
    epoch, prompt, sample, part = key
    return f"prompt {prompt} sample {sample}" + f" part {part}" * bool(part) + f" of epoch {epoch}"


def _by_token(a: pa.Table, b: pa.Table, columns: Sequence[str]) -> list[str]:
    """Returns the columns, those of SAMPLING as they begin to differ in the first differing sample."""
    sampling = [name for name in SAMPLING if name in columns]
    differing = [np.flatnonzero(_differs(a[name], b[name])) for name in sampling]
    rows = [found[0] for found in differing if len(found)]
    if not rows:
        return list(columns)
    i = min(rows)
    one, other = a.slice(i, 1).to_pylist()[0], b.slice(i, 1).to_pylist()[0]
    places = {name: _first_token(name, one, other) for name in sampling}
    ordered = iter(sorted(sampling, key=lambda name: (places[name], SAMPLING.index(name))))
    return [next(ordered) if name in sampling else name for name in columns]


def _first_token(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Returns the first token at which a column of SAMPLING differs; infinity if it does not."""
    read = PER_TOKEN[name]
    own, others = read(a), read(b)
    i = _first_index(own, others)
    return float("inf") if i is None else min(_token(a, name, i), _token(b, name, i))


def _token(row: Mapping[str, Any], name: str, i: int) -> int:
    """Returns the index in `token_ids` of entry i of a column; the length for an entry after the last."""
    if name in ("token_ids", "action_ranges"):
        return i
    actions = _actions(row)
    return actions[i] if i < len(actions) else len(row["token_ids"])


def _actions(row: Mapping[str, Any]) -> list[int]:
    return [i for span in row["action_ranges"] for i in range(span["start"], span["end"])]


def _mask(row: Mapping[str, Any]) -> list[bool]:
    actions = set(_actions(row))
    return [i in actions for i in range(len(row["token_ids"]))]


PER_TOKEN: Mapping[str, Callable[[Mapping[str, Any]], list]] = {
    "weight_versions": lambda row: [v["version"] for v in row["weight_versions"] for _ in range(v["count"])],
    "token_ids": lambda row: row["token_ids"],
    "rollout_log_probs": lambda row: row["rollout_log_probs"],
    "action_ranges": _mask,
}
"""Column of SAMPLING -> function from a row to its values, one per token or action."""


def _column(name: str, a: pa.Table, b: pa.Table) -> Compared:
    differs = _differs(a[name], b[name])
    rows = np.flatnonzero(differs)
    if not len(rows):
        return Compared(quantity=name, number=f"{len(a)} samples")
    i = int(rows[0])
    one, other = a.slice(i, 1).to_pylist()[0], b.slice(i, 1).to_pylist()[0]
    where = f"row {i}, {_named(tuple(one[key] for key in IDENTITY))}"
    largest = [_largest(a[name][int(row)].as_py(), b[name][int(row)].as_py()) for row in rows]
    known = [value for value in largest if value is not None]
    return Compared(
        quantity=name,
        first=f"{where}{_detail(name, one, other)}",
        number=f"{len(rows)} of {len(a)} samples",
        largest=max(known) if known else None,
    )


def _differs(a: pa.ChunkedArray, b: pa.ChunkedArray) -> np.ndarray:
    """Returns the mask of rows whose values differ in any bit, (rows,)."""
    if a.type == b.type and _bits(a) == _bits(b):
        return np.zeros(len(a), bool)
    pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
    return np.fromiter((not same(x, y) for x, y in pairs), bool, len(a))


def _bits(column: pa.ChunkedArray) -> list[bytes]:
    """Returns bytes that are equal only if two columns are equal bit for bit."""
    values = column.combine_chunks()
    missing = [values.is_null().to_numpy(zero_copy_only=False).tobytes()]
    if pa.types.is_list(values.type):
        missing.append(values.value_lengths().fill_null(0).to_numpy().tobytes())
        values = values.flatten()
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)) or values.null_count:
        return [repr(column.to_pylist()).encode()]
    return [*missing, values.to_numpy().tobytes()]


def same(a: Any, b: Any) -> bool:
    """Returns True if two values are equal bit for bit. NaN equals NaN, and 0.0 differs from -0.0."""
    return repr(a) == repr(b)


def _largest(a: Any, b: Any) -> float | None:
    """Returns the largest difference of two numbers, or lists of numbers of equal length; None for others."""
    one, other = (value if isinstance(value, list) else [value] for value in (a, b))
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    if len(one) != len(other) or not all(map(is_number, [*one, *other])):
        return None
    return float(np.max(np.abs(np.subtract(one, other, dtype=float)), initial=0.0))


def _first_index(a: Sequence, b: Sequence) -> int | None:
    """Returns the first index at which two lists differ, also by their lengths; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if not same(x, y):
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _detail(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    read = PER_TOKEN.get(name, lambda row: row[name])
    one, other = read(a), read(b)
    if not (isinstance(one, list) and isinstance(other, list)):
        return f": {shown(one)} | {shown(other)}"
    i = _first_index(one, other) or 0
    values = f"{_entry(one, i)} | {_entry(other, i)}"
    if name in ("token_ids", "action_ranges"):
        return f", token {i}: {values}"
    if len(one) == len(a["rollout_log_probs"]) and name in (*SAMPLING, *LEARNING):
        return f", token {_token(a, name, i)} (action {i}): {values}"
    return f", entry {i}: {values}"


def _entry(values: Sequence, i: int) -> str:
    return shown(values[i]) if i < len(values) else "no entry"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def compare_metrics(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Compared]:
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            text = "only in the first" if name in a else "only in the second"
            yield Compared(quantity=name, first=f"{text}: {a.get(name, b.get(name))!r}")
        elif same(a[name], b[name]):
            yield Compared(quantity=name)
        else:
            text = f"{a[name]!r} | {b[name]!r}"
            yield Compared(quantity=name, first=text, largest=_largest(a[name], b[name]))
