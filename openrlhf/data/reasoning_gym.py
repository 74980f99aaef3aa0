"""Problems of the package reasoning-gym (https://github.com/open-thought/reasoning-gym).

They are generated from a specification, and again in the process that verifies their answers.
"""

import difflib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

from openrlhf.config.reasoning_gym import GymSpec, parse_gym
from openrlhf.errors import first_line

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

    Raises ValueError, at most three lines, for anything wrong with the specification.
    """
    where = f"{flag} {item}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"{where}: the package is not installed: {error}\nRun: pip install openrlhf[gym]"
        ) from error
    try:
        spec = parse_gym(item)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if spec.name not in DATASETS:
        raise ValueError(f"{where}: reasoning_gym has no {spec.name}.{_near(spec.name, DATASETS)}")
    if spec.name in NOT_REPEATABLE:
        raise ValueError(
            f"{where}: {spec.name} makes other problems in every process, so no other process can verify "
            "answers.\nChoose another dataset, or write its rows to a file and name a reward function."
        )
    if spec.name == "composite":
        raise ValueError(f"{where}: name the parts with commas between them, and --data.prompt_probs.")
    known = [field.name for field in fields(DATASETS[spec.name][1])]
    for parameter in spec.parameters:
        if parameter not in known:
            raise ValueError(
                f"{where}: {spec.name} has no parameter {parameter}.{_near(parameter, known)}\n"
                f"Its parameters: {', '.join(known)}"
            )
    try:
        return _create(reasoning_gym, spec)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {spec.name} refuses its parameters: {first_line(error)}") from error


def gym_rows(item: str, flag: str) -> Iterator[dict[str, str]]:
    """Yields rows with `input`: the question, `label`: the key from which `entry_of` generates the problem
    again, and `datasource`: the dataset's name."""
    dataset = gym_dataset(item, flag)
    name = parse_gym(item).name
    for i in range(dataset.size):
        question = dataset[i]["question"]
        yield {"input": question, "label": f"{item}#{i}#{_digest(question)}", "datasource": name}


@lru_cache(maxsize=1024)  # the samples of a prompt are verified close together
def entry_of(label: str) -> tuple[Any, dict[str, Any]]:
    """Returns (dataset, problem) of a row's label. Raises ValueError where this process generates another
    problem from it."""
    item, index, digest = label.rsplit("#", 2)
    dataset = _dataset_of(item)
    entry = dataset[int(index)]
    if _digest(entry["question"]) != digest:
        raise ValueError(
            f"{label}: reasoning_gym made another problem where the prompt was made, so the answer cannot be "
            "verified. Are the versions the same on all machines?"
        )
    return dataset, entry


@cache
def _dataset_of(item: str) -> Any:
    return gym_dataset(item, "label")


def _create(package: Any, spec: GymSpec) -> Any:
    return package.create_dataset(spec.name, size=spec.size, seed=spec.seed, **spec.parameters)


def _digest(question: str) -> str:
    return f"{crc32(question.encode()):08x}"


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]}?" if near else ""
