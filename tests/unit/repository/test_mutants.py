"""The catalogue of mutants: every record is complete, and applies to the code as it is."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from mutants.catalogue import (
    REPOSITORIES,
    ROOT,
    DoesNotApply,
    Mutant,
    changed_lines,
    check,
    load,
    mutated,
    table,
)

MUTANTS = load()
CODE = """
def mean(x, y):
    total = sum(x)  # of all
    return total / len(x)

class Row:
    def mean(self):
        return sum(self.x)
"""


def test_every_mutant_changes_one_place() -> None:
    problems = []
    for mutant in MUTANTS:
        try:
            check(mutant)
        except DoesNotApply as problem:
            problems.append(str(problem))
    assert not problems, "\n".join(problems)


def test_names_are_unique() -> None:
    assert not [name for name, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1]


def test_the_catalogue_is_large_and_has_bugs_of_other_frameworks() -> None:
    assert len(MUTANTS) >= 120
    assert sum(bool(mutant.threads) for mutant in MUTANTS) >= 40
    assert {"old-log-probs-at-temperature-1", "images-not-compared"} <= {mutant.id for mutant in MUTANTS}


def test_every_record_says_what_a_user_sees_and_where_it_happened() -> None:
    known = re.compile(rf"({'|'.join(REPOSITORIES)}) #\d+")
    problems = [mutant.id for mutant in MUTANTS if len(mutant.seen.split()) < 4]
    problems += [thread for m in MUTANTS for thread in m.threads if not known.fullmatch(thread)]
    problems += [paper for m in MUTANTS for paper in m.papers if not paper.startswith("http")]
    assert not problems


def test_the_tests_that_records_name_exist() -> None:
    missing = []
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        path, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if not (ROOT / path).exists() or f"def {function}(" not in (ROOT / path).read_text():
            missing.append(test)
    assert not missing


def test_the_page_has_the_table_of_classes() -> None:
    page = (ROOT / "docs" / "verification.md").read_text()
    assert table(MUTANTS) in page, "python -m mutants.catalogue prints the table"


def mutant_of(place: str, find: str, new: str) -> Mutant:
    return Mutant(id="a", group="b", place=f"made:{place}", find=find, replace=new, seen="a wrong mean")


@pytest.mark.parametrize(
    ("place", "find", "new", "line"),
    [
        ("mean", "total/len( x )", "total", "return total"),
        ("mean", "total = sum(x)", "total = sum(x)\ntotal += 1", "total += 1"),
        ("Row.mean", "self.x", "self.y", "return sum(self.y)"),
        ("Row", "sum(self.x)", "0", "return 0"),
        ("", "sum(x)", "max(x)", "total = max(x)"),
    ],
)
def test_a_mutant_replaces_code(tmp_path: Path, place: str, find: str, new: str, line: str) -> None:
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "made.py").write_text(CODE)
    mutant = mutant_of(place, find, new)
    assert line in [text.strip() for text in mutated(mutant, tmp_path).splitlines()]
    assert mutated(mutant, tmp_path) == mutated(mutant, tmp_path)


@pytest.mark.parametrize(
    ("place", "find", "new"),
    [
        ("", "mean", "x"),  # no expression
        ("", "sum", "max"),  # twice
        ("median", "sum(x)", "max(x)"),
        ("mean", "sum(x)", "sum( x )"),  # the same
    ],
)
def test_a_mutant_without_exactly_one_place_does_not_apply(
    tmp_path: Path, place: str, find: str, new: str
) -> None:
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "made.py").write_text(CODE)
    with pytest.raises(DoesNotApply):
        check(mutant_of(place, find, new), tmp_path)
    with pytest.raises(DoesNotApply):
        check(replace(mutant_of(place, find, new), place="missing:mean"), tmp_path)


LONG = """
def total(rows):
    if any(
        row.is_late
        for row in rows
    ):
        return sum(
            row.size
            for row in rows
        )
    return 0
"""


@pytest.mark.parametrize(
    ("find", "new", "lines"),
    [
        ("row.is_late", "True", range(3, 7)),  # the head of the `if`, without its body
        ("row.size", "1", range(7, 11)),  # the whole statement
        ("return 0", "return 1", range(11, 12)),
    ],
)
def test_the_changed_lines_are_those_of_the_statement_without_its_body(
    tmp_path: Path, find: str, new: str, lines: range
) -> None:
    (tmp_path / "openrlhf").mkdir()
    (tmp_path / "openrlhf" / "made.py").write_text(LONG)
    assert changed_lines(mutant_of("total", find, new), tmp_path) == lines
