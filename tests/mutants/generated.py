"""Generated mutants: the changes of single expressions that mutmut's operators make in the functions of
`PLACES`.

    python -m mutants.run --generated 400 --seed 1

A mutant is known by its module, its function and its texts, so it stays the same when code around it changes.
Messages for people are not mutated: they are strings with a blank, and everything in a `raise` statement.
"""

import ast
import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutants.catalogue import FOLDER, ROOT
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

PLACES = (
    "algorithms/**/*.py",
    "training/objectives/*.py",
    "training/advantages.py",
    "training/collect.py",
    "training/schedule.py",
    "training/trained_worker.py",
    "training/worker.py",
    "rollout/trajectories.py",
    "rollout/worker.py",
    "backends/weight_sync/*.py",
)
"""The files that are mutated by default, below `openrlhf`."""
MISSED = ("SURVIVED", "not executed")
"""Outcomes of mutants that no test caught."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A mutant that changes one expression of a function."""

    path: str
    """Path of the file, relative to the repository's root."""
    function: str
    """A function, or `Class.method`."""
    original: str
    changed: str
    occurrence: int = 0
    """Number of earlier mutants of the function with the same two texts."""

    @property
    def id(self) -> str:
        texts = (self.path, self.function, self.original, self.changed, str(self.occurrence))
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:10]

    def source(self, root: Path = ROOT) -> str:
        """Returns the changed file's content. Raises KeyError if the code has no such mutant any more."""
        module, mutations = _mutations((root / self.path).read_text(), self.path)
        mutation = mutations[self]
        changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
        return cst.ensure_type(changed, cst.Module).code

    def lines(self, root: Path = ROOT) -> tuple[str, str]:
        """Returns the lines that differ between the file and the changed file, for a reader."""
        before, after = (root / self.path).read_text().splitlines(), self.source(root).splitlines()
        while before and after and before[0] == after[0]:
            del before[0], after[0]
        while before and after and before[-1] == after[-1]:
            del before[-1], after[-1]
        return " ".join(map(str.strip, before)), " ".join(map(str.strip, after))


def sample(count: int, seed: str, root: Path = ROOT, places: Sequence[str] = PLACES) -> list[Generated]:
    """Chooses mutants by a hash of their names, so that a change of one file leaves those of others."""
    rank = lambda mutant: hashlib.sha256(f"{seed} {mutant.id}".encode()).digest()
    return sorted(generate(root, places), key=rank)[:count]


def generate(root: Path = ROOT, places: Sequence[str] = PLACES) -> Iterator[Generated]:
    """Yields all mutants of these files of the package below `root`."""
    for place in places:
        for file in sorted((root / "openrlhf").glob(place)):
            yield from _mutations(file.read_text(), str(file.relative_to(root)))[1]


class Results:
    """The outcomes of mutants, as JSON lines in a file, which later runs continue."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records: dict[str, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.records = {record["id"]: record for record in map(json.loads, lines)}

    def wants(self, mutant: Generated, again: bool) -> bool:
        """Returns whether the mutant is still to be tried. `again`: survivors are."""
        outcome = self.outcome(mutant)
        return outcome in ("", "not in memory") or (again and outcome in MISSED and not reason(mutant))

    def outcome(self, mutant: Generated) -> str:
        """Returns a mutant's last outcome, which another process may have written; "" if there is none."""
        self._read()
        return self.records.get(mutant.id, {"outcome": ""})["outcome"]

    def add(self, mutant: Generated, outcome: str, test: str, seconds: float) -> None:
        record = {"id": mutant.id, **asdict(mutant), "outcome": outcome, "test": test}
        self.file.parent.mkdir(exist_ok=True)
        with self.file.open("a") as lines:
            lines.write(json.dumps(record | {"seconds": round(seconds, 1)}) + "\n")


def summary(mutants: Sequence[Generated], results: Results, root: Path = ROOT) -> str:
    """Formats the mutants that no test caught, equivalent ones last, and the numbers of all."""
    outcomes = {mutant: results.outcome(mutant) for mutant in mutants}
    missed = [mutant for mutant in mutants if outcomes[mutant] in MISSED]
    lines = []
    for mutant in sorted(missed, key=lambda mutant: (bool(reason(mutant)), mutant.path, mutant.function)):
        before, after = mutant.lines(root)
        title = f"equivalent: {reason(mutant)}" if reason(mutant) else outcomes[mutant]
        lines += [f"{mutant.id}  {mutant.path}:{mutant.function}  {title}", f"  - {before}", f"  + {after}"]
    equivalent = sum(bool(reason(mutant)) for mutant in missed)
    caught = sum(outcome == "caught" for outcome in outcomes.values())
    share = caught / max(1, caught + len(missed) - equivalent)
    return "\n".join(lines) + (
        f"\n{len(mutants)} mutants: {caught} caught, {len(missed) - equivalent} not caught, {equivalent} "
        f"equivalent; {share:.1%} of those that are not equivalent are caught"
    )


@cache
def equivalents(file: Path = FOLDER / "equivalent.toml") -> dict[Generated, str]:
    """Reads the mutants that no test can catch, and the reasons."""
    records = tomllib.loads(file.read_text())["equivalent"]
    return {Generated(**{k: v for k, v in r.items() if k != "why"}): r["why"] for r in records}


def reason(mutant: Generated) -> str:
    """Returns why a mutant is equivalent to the original; "" for the others."""
    return equivalents().get(mutant, "")


class _Visitor(MutationVisitor):
    """Mutates functions with decorators too: mutmut's way to switch mutants on would not work with them."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            node = node.with_changes(decorators=())
        return isinstance(node, cst.Raise) or super()._skip_node_and_children(node)


@cache
def _mutations(source: str, path: str) -> tuple[cst.Module, dict[Generated, Mutation]]:
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    names, seen, found = dict(_functions(module)), Counter[tuple[str, str, str]](), {}
    for mutation in visitor.mutations:
        function = names.get(mutation.contained_by_top_level_function)
        original, changed = (_text(node) for node in (mutation.original_node, mutation.mutated_node))
        if function is None or _is_message(mutation.original_node) or _is_same(original, changed):
            continue
        key = function, original, changed
        mutant = Generated(
            path=path, function=function, original=original, changed=changed, occurrence=seen[key]
        )
        seen[key] += 1
        found[mutant] = mutation
    return module, found


def _functions(module: cst.Module) -> Iterator[tuple[cst.CSTNode | None, str]]:
    """Yields the functions and methods of a module, with their names."""
    for node in module.body:
        if isinstance(node, cst.FunctionDef):
            yield node, node.name.value
        elif isinstance(node, cst.ClassDef):
            for member in node.body.body:
                if isinstance(member, cst.FunctionDef):
                    yield member, f"{node.name.value}.{member.name.value}"


def _text(node: cst.CSTNode) -> str:
    return " ".join(cst.Module([]).code_for_node(node).split())


def _is_message(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString) and " " in node.value


def _is_same(original: str, changed: str) -> bool:
    try:
        return ast.dump(ast.parse(original)) == ast.dump(ast.parse(changed))
    except SyntaxError:  # a part of an expression, such as `is`
        return original == changed
