"""Generated mutants: their names, their code in memory, and what tests say of them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mutmut")
from mutants.catalogue import ROOT
from mutants.generated import Generated, Results, equivalents, generate, reason, sample, summary
from mutants.in_memory import NotInMemory, in_forks, swap
from mutants.run import FAST, UNIT

pytestmark = pytest.mark.processes
MADE = '''
"""Made for tests."""
from contextlib import contextmanager
from functools import cached_property


def smaller(x, y, scale=3):
    if not scale:
        raise ValueError("no scale" + str(1 + 1))
    return scale * (x if x < y else y)


class Base:
    def size(self):
        return 1


class Row(Base):
    def size(self):
        return super().size() + 4

    @property
    def double(self):
        return 5 * self.size()

    @cached_property
    def triple(self):
        return 6 * self.size()

    @staticmethod
    @contextmanager
    def opened():
        yield 7
'''
PRODUCT = "scale * (x if x < y else y)"
TESTS = """
from openrlhf.algorithms.made import smaller

def test_smaller():
    print("seen")
    assert smaller(1, 2) == 3 and smaller(2, 1) == 3 and smaller(2, 2) == 6
"""
OTHER_TESTS = """
import pytest
from openrlhf.algorithms.made import Row

class Two:
    size = lambda self: 2

def test_triple():
    assert Row.triple.func(Two()) == 12

@pytest.mark.processes
def test_double():
    assert Row().double == 25
"""
TRIAL = """
import json, sys
from pathlib import Path
import pytest
from mutants.generated import generate
from mutants.in_memory import Trials
from mutants.run import FAST, _plan

seen = {}
old = {"tests/unit/test_gone.py": {"fixtures": ["algorithms/made.py:Row.size"], "tests": {"gone": [0, []]}}}
note = lambda item, result, seconds: seen.update({item if isinstance(item, str) else item.id: result})
trials = Trials(list(generate(Path.cwd())), old, _plan, 2, note)
pytest.main(["-p", "no:cacheprovider", "-m", FAST.marks, *FAST.folders], plugins=[trials])
assert old and "tests/unit/test_gone.py" not in trials.seen
Path("outcomes.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in {
        "openrlhf/__init__.py": "",
        "openrlhf/algorithms/__init__.py": "",
        "openrlhf/algorithms/made.py": MADE,
        "tests/unit/test_made.py": TESTS,
        "tests/contracts/test_others.py": OTHER_TESTS,
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.fixture
def module(root: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("made", root / "openrlhf/algorithms/made.py")
    assert specification and specification.loader
    made = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(made)
    return made


def mutant(root: Path, function: str, original: str, changed: str, occurrence: int = 0) -> Generated:
    wanted = (function, original, changed, occurrence)
    (found,) = (m for m in generate(root) if (m.function, m.original, m.changed, m.occurrence) == wanted)
    return found


def test_mutants_are_known_by_their_texts(root: Path) -> None:
    before = mutant(root, "smaller", "< y", "<= y")
    file = root / before.path
    file.write_text(file.read_text().replace("def smaller", "LIMIT = 1\n\n\ndef smaller"))
    assert mutant(root, "smaller", "< y", "<= y") == before
    assert before.id == mutant(root, "smaller", "< y", "<= y").id
    assert before.lines(root) == ("return scale * (x if x < y else y)", "return scale * (x if x <= y else y)")


def test_mutants_differ_from_the_original_and_from_each_other(root: Path) -> None:
    sources = [m.source(root) for m in generate(root)]
    assert len(sources) > 10 and len({MADE, *sources}) == len(sources) + 1
    assert len({m.id for m in generate(root)}) == len(sources)


def test_messages_are_left_out(root: Path) -> None:
    assert not [m for m in generate(root) if "no scale" in m.original or "1 + 1" in m.original]


def test_a_sample_is_reproducible_and_survives_changes_elsewhere(root: Path) -> None:
    first = sample(5, "1", root)
    assert first == sample(5, "1", root) and first != sample(5, "2", root)
    assert sample(7, "1", root)[:5] == first
    (root / "openrlhf/algorithms/other.py").write_text("def other(x):\n    return x + 1\n")
    ids = [m.id for m in sample(1000, "1", root) if m.path.endswith("made.py")]
    assert ids[:5] == [m.id for m in first]


def test_other_files_can_be_mutated(root: Path) -> None:
    (root / "openrlhf/data.py").write_text("def other(x):\n    return x + 1\n")
    assert {m.path for m in sample(1000, "1", root)} == {"openrlhf/algorithms/made.py"}
    assert {m.path for m in sample(1000, "1", root, ["data.py"])} == {"openrlhf/data.py"}


def test_the_package_has_mutants_of_every_place() -> None:
    """Only the files are listed here: generating all mutants takes long."""
    from mutants.generated import PLACES

    assert not [place for place in PLACES if not list((ROOT / "openrlhf").glob(place))]


@pytest.mark.parametrize(
    ("function", "original", "changed", "call", "value"),
    [
        ("smaller", PRODUCT, PRODUCT.replace("*", "/"), lambda made: made.smaller(2, 3), 1.5),
        ("Row.size", "4", "5", lambda made: made.Row().size(), 6),
        ("Row.double", "5", "6", lambda made: made.Row().double, 30),
        ("Row.triple", "6", "7", lambda made: made.Row().triple, 35),
        ("Row.opened", "7", "8", lambda made: made.Row.opened().__enter__(), 8),
    ],
)
def test_a_function_gets_its_new_code(
    root: Path, module: ModuleType, function: str, original: str, changed: str, call, value: float
) -> None:
    assert call(module) != value
    swap(module, function, mutant(root, function, original, changed).source(root))
    assert call(module) == value


def test_modules_that_imported_the_function_see_the_change(root: Path, module: ModuleType) -> None:
    smaller = module.smaller
    swap(module, "smaller", mutant(root, "smaller", PRODUCT, PRODUCT.replace("*", "/")).source(root))
    assert smaller(2, 3) == 1.5


@pytest.mark.parametrize(
    ("function", "original", "changed"),
    [("smaller", "3", "4"), ("Row.size", "super().size() + 4", "None")],  # a default; a closure
)
def test_more_than_code_cannot_change_in_memory(
    root: Path, module: ModuleType, function: str, original: str, changed: str
) -> None:
    with pytest.raises(NotInMemory):
        swap(module, function, MADE.replace(original, changed))


def test_the_tests_of_generated_mutants_are_those_of_make_fast() -> None:
    command = re.search(r"^fast:.*\n\t.*pytest (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command
    _, chosen, folders = command[1].split('"')
    assert sorted(folders.split()) == sorted(FAST.folders)
    assert FAST.marks == f"{chosen} and not gpu"  # which no test of these folders is
    assert FAST.records != UNIT.records


def test_fast_tests_catch_mutants_in_memory_and_equivalent_ones_survive(root: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{root}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", TRIAL], cwd=root, env=environment, check=True, timeout=300)
    outcomes = json.loads((root / "outcomes.json").read_text())
    found = {(m.function, m.original, m.changed): outcomes[m.id] for m in generate(root)}
    test = "tests/unit/test_made.py::test_smaller"
    assert found["smaller", PRODUCT, PRODUCT.replace("*", "/")] == ["caught", test]
    assert found["smaller", "< y", "<= y"] == ["SURVIVED", ""]
    assert found["smaller", "3", "4"] == ["not in memory", ""]
    assert found["Row.triple", "6", "7"] == ["caught", "tests/contracts/test_others.py::test_triple"]
    assert found["Row.double", "5", "6"] == ["not executed", ""]  # but by a test that starts processes
    assert found["Row.size", "4", "5"] == ["not executed", ""]
    assert outcomes["tests/unit/test_made.py"]["tests"][test][1] == ["algorithms/made.py:smaller"]


def double(item: float) -> float:
    if item == 0:
        os._exit(1)
    if item == -1:
        time.sleep(60)
    while item == -2:
        pass
    return 2 * item


def test_a_fork_that_ends_or_takes_too_long_has_no_result() -> None:
    limit = lambda item: 1 if item < 0 else 300
    found = {item: result for item, result, _ in in_forks([1, 0, -1, -2, 2], double, 2, limit)}
    assert found == {1: 2, 0: None, -1: None, -2: None, 2: 4}


def test_an_error_of_the_harness_is_no_outcome() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_forks([0], lambda item: 1 / item, 1, lambda item: 10))


def test_results_continue(root: Path, tmp_path: Path) -> None:
    caught, survived = mutant(root, "smaller", "3", "4"), mutant(root, "smaller", "< y", "<= y")
    file = tmp_path / "results" / "outcomes.jsonl"
    assert Results(file).wants(caught, again=False)
    Results(file).add(caught, "not in memory", "", 0.1)
    assert Results(file).wants(caught, again=False)
    Results(file).add(caught, "caught", "test", 0.1)
    Results(file).add(survived, "SURVIVED", "", 0.1)
    assert [Results(file).wants(m, again=False) for m in (caught, survived)] == [False, False]
    assert [Results(file).wants(m, again=True) for m in (caught, survived)] == [False, True]
    table = summary([caught, survived], Results(file), root).splitlines()
    assert table[0].split()[1:] == ["openrlhf/algorithms/made.py:smaller", "SURVIVED"]
    assert table[1:3] == [
        f"  {sign} return scale * (x if x {op} y else y)" for sign, op in ("-<", ("+", "<="))
    ]
    assert table[3].startswith("2 mutants: 1 caught, 1 not caught, 0 equivalent; 50.0%")


def test_every_equivalent_mutant_still_exists_and_has_a_reason() -> None:
    places = {mutant.path.removeprefix("openrlhf/") for mutant in equivalents()}
    assert not equivalents().keys() - set(generate(ROOT, sorted(places)))
    assert all(map(reason, equivalents()))
