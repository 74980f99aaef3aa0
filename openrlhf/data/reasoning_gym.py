"""Problems of the package reasoning-gym (https://github.com/open-thought/reasoning-gym).

They are generated from a specification, and again in the process that verifies their answers.
"""

import difflib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, lru_cache, partial
from typing import Any
from zlib import crc32

from openrlhf.config.reasoning_gym import parse_gym
from openrlhf.errors import ErrorCode, RunError, UsageError, first_line

COLUMNS = ("input", "label", "datasource")
NOT_REPEATABLE = (
    "codeio",
    "isomorphic_strings",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
)
"""Datasets whose problems depend on the process that generates them (on the order of sets, on earlier
problems), so that another process cannot verify answers."""


def gym_dataset(item: str, flag: str) -> Any:
    """Returns the dataset of a specification, which generates its problems on access.

    Raises UsageError, at most three lines, for anything wrong with the specification.
    """
    error = partial(UsageError, flag=flag, value=item)
    try:
        import reasoning_gym
    except ImportError as missing:
        text = f'the package is not installed: {missing}\nRun: pip install "openrlhf[gym]"'
        raise error(ErrorCode.MISSING_PACKAGE, text) from missing
    try:
        spec = parse_gym(item)
    except ValueError as reason:
        raise error(ErrorCode.INVALID_VALUE, str(reason)) from reason
    datasets = reasoning_gym.factory.DATASETS
    if spec.name not in datasets:
        text = f"reasoning_gym has no {spec.name}.{_near(spec.name, datasets)}"
        raise error(ErrorCode.NOT_FOUND, text)
    if spec.name in NOT_REPEATABLE:
        raise error(
            ErrorCode.UNSUPPORTED,
            f"{spec.name} generates other problems in every process, so no other process can verify "
            "answers.\nChoose another dataset, or write its rows to a file and name a reward function.",
        )
    if spec.name == "composite":
        text = "list its datasets separated by commas instead, with --data.prompt_probs."
        raise error(ErrorCode.UNSUPPORTED, text)
    known = [field.name for field in fields(datasets[spec.name][1])]
    for parameter in spec.parameters:
        if parameter not in known:
            near = _near(parameter, known)
            text = f"{spec.name} has no parameter {parameter}.{near}\nIts parameters: {', '.join(known)}"
            raise error(ErrorCode.INVALID_VALUE, text)
    try:
        return reasoning_gym.create_dataset(spec.name, size=spec.size, seed=spec.seed, **spec.parameters)
    except (AssertionError, TypeError, ValueError) as reason:
        text = f"{spec.name} refuses its parameters: {first_line(reason)}"
        raise error(ErrorCode.INVALID_VALUE, text) from reason


def gym_rows(item: str, flag: str) -> Iterator[dict[str, str]]:
    """Yields rows with `input`: the question, `label`: the key from which `find_entry` generates the problem
    again, and `datasource`: the dataset's name."""
    dataset = gym_dataset(item, flag)
    name = parse_gym(item).name
    for i in range(dataset.size):
        question = dataset[i]["question"]
        yield {"input": question, "label": f"{item}#{i}#{_digest(question)}", "datasource": name}


@lru_cache(maxsize=1024)  # the samples of a prompt are verified close together
def find_entry(label: str) -> tuple[Any, dict[str, Any]]:
    """Returns (dataset, problem) of a row's label. Raises RunError if this process generates another
    problem from it."""
    item, index, digest = label.rsplit("#", 2)
    dataset = _cached_dataset(item, "label")
    entry = dataset[int(index)]
    if _digest(entry["question"]) != digest:
        text = (
            "this process generates another problem than the one of the prompt, so the answer cannot be "
            "verified. Install the same version of reasoning_gym on all machines."
        )
        raise RunError(ErrorCode.REWARDS_FAILED, text, value=label)
    return dataset, entry


_cached_dataset = cache(gym_dataset)


def _digest(question: str) -> str:
    return f"{crc32(question.encode()):08x}"


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]}?" if near else ""
