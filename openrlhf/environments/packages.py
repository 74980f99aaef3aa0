"""Packages of environments, which are extras of this one."""

from importlib import import_module
from types import ModuleType

EXTRAS = {"gem": "gem", "reasoning_gym": "gym", "textarena": "textarena", "verifiers": "verifiers"}


def package(name: str) -> ModuleType:
    """The module `name` of one of EXTRAS. ImportError, which names the extra, where it is not installed."""
    root = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != root:
            raise
        raise ImportError(f"{root} is not installed; run: pip install openrlhf[{EXTRAS[root]}]") from error
