"""Optional packages of environments, installed as extras."""

from importlib import import_module
from types import ModuleType

EXTRAS = {"gem": "gem", "reasoning_gym": "gym", "textarena": "textarena", "verifiers": "verifiers"}
"""Extras of this project by package name."""


def package(name: str) -> ModuleType:
    """Imports the module `name` of a package in EXTRAS. Raises ImportError with the extra's name if the
    package is not installed."""
    root = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != root:
            raise
        text = f'{root} is not installed; run: pip install "openrlhf[{EXTRAS[root]}]"'
        raise ImportError(text) from error
