"""What a checkpoint is of: the flags, data and models of its run; and whether another run may go on with
it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from openrlhf.config.command import SECRETS
from openrlhf.config.fields import to_words, values_of
from openrlhf.config.resume import Change, change_of, remarks_of
from openrlhf.observability.run_folder import redact

SHOWN = 3
"""Flags that a remark names; of more it tells the number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    command: str
    """As in `openrlhf NAME`; "" where a checkpoint does not say."""
    flags: Mapping[str, Any]
    """Every flag but the secret ones -> its value, as JSON knows it."""
    contents: Mapping[str, str]
    """What decides beside the words of flags -> a fingerprint of it. A flag with two dashes stands for what
    it names: a dataset, a model."""

    @classmethod
    def of(cls, command: str, config: Any, contents: Mapping[str, str]) -> Self:
        flags = {key: value for key, value in values_of(config).items() if key not in SECRETS}
        return cls(command=command, flags=json.loads(redact(json.dumps(flags), set())), contents=contents)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """What supervised checkpoints without a file of their own say: a few flags and the data."""
        flags = {name.removeprefix("--"): v for name, v in state.items() if name != "--data.dataset"}
        return cls(command="", flags=flags, contents={"--data.dataset": str(state["--data.dataset"])})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Comparison(NamedTuple):
    differences: list[str]
    """What forbids to go on, one text for each."""
    remarks: list[str]


def compare(before: Origin, now: Origin) -> Comparison:
    """May a run of `now` go on with a checkpoint of `before`?"""
    if before.command not in ("", now.command):
        return Comparison([f"it is of `openrlhf {before.command}`, and this is `openrlhf {now.command}`"], [])
    remarks = remarks_of(now.command)
    comparison = Comparison([], [])
    for name, text in _changes(before, now):
        key = name.removeprefix("--")
        if key in remarks:
            comparison.remarks.append(f"{text}: {remarks[key]}")
        else:
            comparison.differences.append(text)
    comparison.remarks.extend(_unknown(before, now))
    return comparison


def _changes(before: Origin, now: Origin) -> Iterator[tuple[str, str]]:
    """(flag, what it was and is) of all that has changed and matters."""
    by_content = before.contents.keys() & now.contents.keys()
    for key in now.flags:
        if key not in before.flags or f"--{key}" in by_content:
            continue
        was, is_ = before.flags[key], now.flags[key]
        if was != is_ and change_of(now.command, key) is not Change.FREE:
            yield f"--{key}", f"--{key} was {_shown(was)}, is {_shown(is_)}"
    for name in now.contents:
        if name in by_content and before.contents[name] != now.contents[name]:
            yield name, f"{name} was {_content(before, name)}, is {_content(now, name)}"


def _unknown(before: Origin, now: Origin) -> Iterator[str]:
    """A remark on what only one of the two knows."""
    keys = [
        f"--{key}"
        for key in {**now.flags, **before.flags}
        if (key in now.flags) != (key in before.flags) and change_of(now.command, key) is not Change.FREE
    ]
    names = keys if before.command else [*keys, *(n for n in now.contents if n not in before.contents)]
    if names := list(dict.fromkeys(names)):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"written by another version, so these could not be compared: {', '.join(names[:SHOWN])}{more}"


def _content(origin: Origin, name: str) -> str:
    words = origin.flags.get(name.removeprefix("--"))
    return f"{_shown(words)} ({origin.contents[name]})" if words else origin.contents[name]


def _shown(value: Any) -> str:
    return " ".join(to_words(tuple(value) if isinstance(value, list) else value)) or "''"
