"""Options of other libraries that have no flag of their own and are passed to the library as they are:
`--vllm.engine_args.NAME VALUE`."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from openrlhf.errors import ErrorCode, UsageError

NAMED = {"true": True, "false": False, "none": None, "null": None}
"""Words for values, in whatever case."""


class PassThrough(dict[str, Any]):
    """The value of a flag with options that are passed through: a tree, as JSON has it. Each option can be
    set on its own, `--ds.config.zero_optimization.sub_group_size 1000000`."""

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Merges trees, of which later ones win. Each is the text of a JSON object, or a file with one.
        Raises ValueError for other words."""
        tree: dict[str, Any] = {}
        for word in words:
            try:
                text = word if word.lstrip().startswith("{") else Path(word).read_text(encoding="utf-8")
                more = json.loads(text)
            except (OSError, ValueError) as error:
                raise ValueError(f"expects a JSON object, or a file with one ({error})") from None
            if not isinstance(more, dict):
                raise ValueError("the file holds no JSON object")
            tree = merge(tree, more)
        return cls(tree)


def merge(tree: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree with the values of both; those of `more` win."""
    merged = dict(tree)
    for name, value in more.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(old, value) if both else value
    return merged


def unknown_option(flag: str, name: str, known: Iterable[str], problem: str) -> UsageError:
    """Returns the error for an option that the library does not have, with the nearest of those `known`."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "remove it"
    return UsageError(ErrorCode.UNKNOWN_FLAG, f"{problem}; {remedy}", flag=f"{flag}.{name}")


def to_text(name: str, words: Sequence[str]) -> str:
    """Returns the JSON text of a tree with one option. `name`: its dotted name. No word: True; several: a
    list."""
    values = [read_value(word) for word in words]
    value: Any = True if not values else values[0] if len(values) == 1 else values
    for part in reversed(name.split(".")):
        value = {part: value}
    return json.dumps(value)


def read_value(word: str) -> Any:
    """Returns the value of a word: JSON, a number such as .5, which JSON lacks, or else a text."""
    if word.lower() in NAMED:
        return NAMED[word.lower()]
    try:
        return json.loads(word)
    except ValueError:
        return float(word) if re.fullmatch(r"[-+]?(\.\d+|\d+\.)", word) else word


def yaml_to_json(node: Any) -> str:
    """Returns a node of a YAML file as JSON. Only unquoted words are numbers and names of values."""

    def convert(node: Any) -> Any:
        if node.id == "mapping":
            return {key.value: convert(value) for key, value in node.value}
        if node.id == "sequence":
            return [convert(item) for item in node.value]
        return read_value(node.value or "null") if node.style is None else node.value

    return json.dumps(convert(node))
