"""Reads the catalogue of mutants: silent bugs, each a small change of one place of the package.

Each .toml file of this folder has the mutants of one class. README.md describes the fields of a record.
"""

import ast
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

REPOSITORIES = {
    "AReaL": "areal-project/AReaL",
    "MarinFold": "Open-Athena/MarinFold",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "ROLL": "alibaba/ROLL",
    "SkyRL": "NovaSky-AI/SkyRL",
    "TRL": "huggingface/trl",
    "miles": "radixark/miles",
    "minimind": "jingyaogong/minimind",
    "ms-swift": "modelscope/ms-swift",
    "open-instruct": "allenai/open-instruct",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "slime": "THUDM/slime",
    "tinker-cookbook": "thinking-machines-lab/tinker-cookbook",
    "vLLM": "vllm-project/vllm",
    "verl": "verl-project/verl",
    "verl-omni": "verl-project/verl-omni",
}
"""Name of a project in records -> its repository on GitHub."""


class DoesNotApply(Exception):
    """Raised if the place of a mutant does not exist, or does not contain its text exactly once."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A record of the catalogue."""

    id: str
    group: str
    """Class of the bug: the title of the record's file."""
    place: str
    """`module:function`, `module:Class.method`, `module:Class` or `module:`, below `openrlhf`."""
    find: str
    """Expression or statements that occur once in the place."""
    replace: str
    seen: str
    """Effect that a user who trains with this bug would see, such as a wrong curve."""
    threads: Sequence[str] = ()
    """Reports of the same bug in other frameworks, such as `TRL #6439`."""
    papers: Sequence[str] = ()
    """Papers and pages that describe the bug, or the equation that it breaks."""
    tests: Sequence[str] = ()
    """Tests that are known to fail with it, such as `tests/unit/algorithms/test_kl.py::test_name`."""

    @property
    def path(self) -> str:
        """Path of the changed file, relative to the repository's root."""
        return "openrlhf/" + self.place.partition(":")[0].replace(".", "/") + ".py"

    @property
    def function(self) -> str:
        return self.place.partition(":")[2]

    @property
    def links(self) -> list[str]:
        return [link(thread) for thread in self.threads] + list(self.papers)


def link(thread: str) -> str:
    project, _, number = thread.rpartition(" #")
    return f"https://github.com/{REPOSITORIES[project]}/issues/{number}"


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Reads all records. Raises TypeError for an unknown or a missing field."""
    return [
        Mutant(group=content["title"], **record)
        for content in (tomllib.loads(file.read_text()) for file in sorted(folder.glob("*.toml")))
        for record in content.get("mutant", ())  # equivalent.toml has none
    ]


def check(mutant: Mutant, root: Path = ROOT) -> None:
    """Raises DoesNotApply unless the mutant changes exactly one place."""
    _find(mutant, root)


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Returns the source of the changed module, without comments. Raises DoesNotApply as `check` does."""
    module, found = _find(mutant, root)
    old, new = getattr(found.parent, found.field), ast.parse(mutant.replace).body
    if found.index is None:
        value: Any = _expression(new)
    else:
        inserted = new if found.is_statement else [_expression(new)]
        value = [*old[: found.index], *inserted, *old[found.index + found.length :]]
    setattr(found.parent, found.field, value)
    try:
        return ast.unparse(ast.fix_missing_locations(module))
    finally:
        setattr(found.parent, found.field, old)


def changed_lines(mutant: Mutant, root: Path = ROOT) -> range:
    """Returns the numbers of the lines that the mutant changes: those of the replaced nodes, and of the
    statement around a replaced expression without the statement's body."""
    module, found = _find(mutant, root)
    value = getattr(found.parent, found.field)
    nodes = [value] if found.index is None else value[found.index : found.index + found.length]
    first, last = nodes[0].lineno, nodes[-1].end_lineno
    around = [
        (node.lineno, _end_of_head(node))
        for node in ast.walk(module)
        if isinstance(node, ast.stmt) and node.lineno <= first and last <= _end_of_head(node)
    ]
    first, last = max(around, key=lambda lines: (lines[0], -lines[1]), default=(first, last))
    return range(first, last + 1)


def _end_of_head(node: ast.stmt) -> int:
    """Returns the last line of a statement before its body."""
    body = getattr(node, "body", None)
    return body[0].lineno - 1 if body and body[0].lineno > node.lineno else node.end_lineno or node.lineno


class _Position(NamedTuple):
    """Position of the nodes that a mutant replaces."""

    parent: ast.AST
    field: str
    index: int | None
    """Index of the first node, if the field is a list."""
    length: int
    """Number of nodes."""
    is_statement: bool


def _find(mutant: Mutant, root: Path) -> tuple[ast.Module, _Position]:
    file = root / mutant.path
    if not file.exists():
        raise DoesNotApply(f"{mutant.id}: {mutant.path} does not exist")
    module = _parse(file.read_text())
    find, replace = ast.parse(mutant.find).body, ast.parse(mutant.replace).body
    is_statement = any(len(body) != 1 or not isinstance(body[0], ast.Expr) for body in (find, replace))
    wanted = [ast.dump(node) for node in (find if is_statement else [_expression(find)])]
    if wanted == [ast.dump(node) for node in (replace if is_statement else [_expression(replace)])]:
        raise DoesNotApply(f"{mutant.id}: the replacement changes nothing")
    found = list(_matches(_place(module, mutant), wanted, is_statement))
    if len(found) != 1:
        raise DoesNotApply(f"{mutant.id}: `{mutant.find}` occurs {len(found)} times in {mutant.place}")
    return module, found[0]


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _place(module: ast.Module, mutant: Mutant) -> ast.AST:
    node: ast.AST = module
    for name in filter(None, mutant.function.split(".")):
        found = [definition for definition in _definitions(node) if definition.name == name]
        if len(found) != 1:
            raise DoesNotApply(f"{mutant.id}: {mutant.place}: {len(found)} definitions of {name}")
        (node,) = found
    return node


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yields the functions and classes below a node that are not inside another function or class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _definitions(child)


def _expression(body: list[ast.stmt]) -> ast.expr:
    assert len(body) == 1 and isinstance(body[0], ast.Expr)
    return body[0].value


def _matches(place: ast.AST, wanted: list[str], is_statement: bool) -> Iterator[_Position]:
    kind, size = ast.stmt if is_statement else ast.expr, len(wanted)
    first = wanted[0].partition("(")[0]  # dumping all nodes would take long

    def is_wanted(nodes: list[Any]) -> bool:
        return (
            type(nodes[0]).__name__ == first
            and all(isinstance(node, kind) for node in nodes)
            and [ast.dump(node) for node in nodes] == wanted
        )

    for node in ast.walk(place):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                for index in range(len(value) - size + 1):
                    if is_wanted(value[index : index + size]):
                        yield _Position(node, field, index, size, is_statement)
            elif size == 1 and is_wanted([value]):
                yield _Position(node, field, None, 1, is_statement)


def table(mutants: Sequence[Mutant]) -> str:
    """Formats the table of docs/verification.md. Its columns count the mutants of a class, those reported in
    other frameworks, and those that a unit test or a test of runs is known to catch."""
    lines = ["| class | mutants | reported elsewhere | caught by unit tests | by tests of runs |"]
    lines.append("|---|---|---|---|---|")
    groups = list(dict.fromkeys(mutant.group for mutant in mutants))
    for name, of_group in [*((g, [m for m in mutants if m.group == g]) for g in groups), ("all", mutants)]:
        reported = sum(bool(mutant.threads) for mutant in of_group)
        of_runs = sum(mutant.tests[0].startswith("tests/e2e/") for mutant in of_group if mutant.tests)
        unit = sum(bool(mutant.tests) for mutant in of_group) - of_runs
        lines.append(f"| {name} | {len(of_group)} | {reported} | {unit} | {of_runs} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(load()))
