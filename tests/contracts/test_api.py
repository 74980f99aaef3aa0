"""The names of `openrlhf.api`: all that the guests use of the rest, and nothing that nobody uses."""

import ast
from collections.abc import Iterator
from pathlib import Path

from openrlhf import api

ROOT = Path(__file__).parents[2]
GUESTS = "tools", "environments", "tasks"


def names_of_guests(*guests: str) -> Iterator[str]:
    for guest in guests:
        for file in (ROOT / "openrlhf" / guest).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "openrlhf.api":
                    yield from (alias.name for alias in node.names)


def test_the_second_group_is_what_the_guests_use() -> None:
    assert set(names_of_guests(*GUESTS)) - set(api.PUBLIC) == set(api.FOR_TOOLS)
    assert not set(api.PUBLIC) & set(api.FOR_TOOLS)


def test_the_reference_uses_no_formula_of_the_product() -> None:
    places = [(api.PUBLIC | api.FOR_TOOLS)[name][0] for name in names_of_guests("tools/reference")]
    assert len(places) > 20 and not [place for place in places if ".algorithms" in place]
