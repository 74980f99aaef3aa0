"""Records the fingerprint of a checkpoint (the run's flags, data and models) and decides whether another run
may continue from it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from openrlhf.config.command import SECRETS
from openrlhf.config.fields import find_change, flag_values, to_words
from openrlhf.config.resume import Change
from openrlhf.observability.run_folder import redact

BUT_GENERATION = " without generation_config.json"
"""Suffix of a model's flag in `RunFingerprint.contents`: the fingerprint of its other files."""

SHOWN = 3
"""Maximum number of flags that a remark lists by name. The others are only counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFingerprint:
    """The flags, data and models of the run that wrote a checkpoint."""

    command: str
    """The command's name, as in `openrlhf NAME`; empty if the checkpoint does not record it."""
    flags: Mapping[str, Any]
    """Values of all flags except secrets, as JSON."""
    contents: Mapping[str, str]
    """Fingerprints of content that flag values do not determine, such as a dataset or a model. If the key is
    a flag (with two dashes), the fingerprint is that of the dataset or model which the flag names."""
    config_type: type = field(default=object, repr=False, compare=False)
    """Configuration of the current run, which says what each flag decides; not recorded."""

    @classmethod
    def of(cls, command: str, config: Any, contents: Mapping[str, str]) -> Self:
        flags = {key: value for key, value in flag_values(config).items() if key not in SECRETS}
        flags = json.loads(redact(json.dumps(flags), set()))
        return cls(command=command, flags=flags, contents=contents, config_type=type(config))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Builds the fingerprint of an older supervised checkpoint, which has no origin file, from the few
        flags in its `state`."""
        flags = {name.removeprefix("--"): v for name, v in state.items() if name != "--data.dataset"}
        return cls(command="", flags=flags, contents={"--data.dataset": str(state["--data.dataset"])})

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "config_type"}


class Comparison(NamedTuple):
    """The result of comparing a checkpoint's fingerprint with that of the current run."""

    differences: list[str]
    """Messages about differences that forbid resuming."""
    remarks: list[str]
    """Messages about differences that allow resuming."""


def compare(before: RunFingerprint, now: RunFingerprint) -> Comparison:
    """Compares the checkpoint's fingerprint with the current run's. Resuming is allowed if `differences` is
    empty."""
    if before.command not in ("", now.command):
        return Comparison([f"`openrlhf {before.command}` wrote it, and this is `openrlhf {now.command}`"], [])
    comparison = Comparison([], [])
    for name, was, is_ in changes(before, now):
        remark = find_change(now.config_type, name.removeprefix("--")).remark
        text = f"{name} was {was}, is {is_}"
        rest = before.contents.get(name + BUT_GENERATION)
        if rest is not None and rest == now.contents.get(name + BUT_GENERATION):
            comparison.remarks.append(f"{text}: only its generation_config.json has changed")
        elif remark:
            comparison.remarks.append(f"{text}: {remark}")
        else:
            comparison.differences.append(text)
    comparison.remarks.extend(unknown(before, now))
    return comparison


def changes(before: RunFingerprint, now: RunFingerprint) -> Iterator[tuple[str, str, str]]:
    """Yields (flag, earlier value, value now) for every changed flag or content that may affect resuming."""
    by_content = before.contents.keys() & now.contents.keys()
    for key in now.flags:
        if key not in before.flags or f"--{key}" in by_content:
            continue
        was, is_ = before.flags[key], now.flags[key]
        if was != is_ and _decides(now, key):
            yield f"--{key}", _shown(was), _shown(is_)
    for name in now.contents:
        is_rest = name.endswith(BUT_GENERATION)
        if name in by_content and before.contents[name] != now.contents[name] and not is_rest:
            yield name, _content(before, name), _content(now, name)


def unknown(before: RunFingerprint, now: RunFingerprint) -> Iterator[str]:
    """Yields a remark that lists the flags and contents that only one of the two fingerprints records."""
    keys = [
        f"--{key}"
        for key in {**now.flags, **before.flags}
        if (key in now.flags) != (key in before.flags) and _decides(now, key)
    ]
    names = keys if before.command else [*keys, *(n for n in now.contents if n not in before.contents)]
    if names := list(dict.fromkeys(names)):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"written by another version, so these could not be compared: {', '.join(names[:SHOWN])}{more}"


def _decides(fingerprint: RunFingerprint, key: str) -> bool:
    """Returns whether a resume depends on a flag."""
    return find_change(fingerprint.config_type, key).change is not Change.FREE


def _content(fingerprint: RunFingerprint, name: str) -> str:
    words = fingerprint.flags.get(name.removeprefix("--"))
    return f"{_shown(words)} ({fingerprint.contents[name]})" if words else fingerprint.contents[name]


def _shown(value: Any) -> str:
    return " ".join(to_words(tuple(value) if isinstance(value, list) else value)) or "''"
