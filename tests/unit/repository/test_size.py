"""The figures of `make size`, and those of the README that come from them."""

import ast
import re
import runpy
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MOST_INNER_IMPORTS = 55
SIZE = runpy.run_path(str(ROOT / "tools" / "size.py"))


def test_code_has_no_blanks_comments_and_docstrings() -> None:
    text = [
        *('"""A module."""', "", "import os  # one", "", "", "def f():", '    """Returns 1."""', "    # why"),
        *("    return (", "        1", "    )"),
    ]
    count = SIZE["code_lines"]("\n".join(text) + "\n")
    assert count == 5  # import, def, and three of the return


def test_what_a_command_reaches(tmp_path: Path) -> None:
    files = {
        "__init__": "from openrlhf.api import *\n",
        "api": "import openrlhf.unused\n",
        "cli": 'def main():\n    import openrlhf.loop\nX = "openrlhf.hook:Hook", "openrlhf.engine"\n',
        "loop": "from openrlhf import text\n",
        "hook": "import os\n",
        "engine": "",
        "text": "",
        "unused": "",
    }
    (tmp_path / "openrlhf").mkdir()
    for name, text in files.items():
        (tmp_path / "openrlhf" / f"{name}.py").write_text(text)
    texts = SIZE["modules"](tmp_path)
    named = {"openrlhf", *(f"openrlhf.{name}" for name in ("cli", "loop", "hook", "engine", "text"))}
    assert SIZE["reached"]("openrlhf.cli", texts) == named


@pytest.mark.processes
def test_the_readme_has_the_figures() -> None:
    """Rounded to thousands for what a command can run; a loop has at most as many lines as it says."""
    readme, found = (ROOT / "README.md").read_text(), SIZE["figures"]()
    thousands = re.search(r"`ppo` can run ([\d.]+) thousand lines of code, `sft` ([\d.]+)", readme)
    assert thousands, "the README says how much code a command can run"
    for said, command in zip(thousands.groups(), ("openrlhf ppo", "openrlhf sft"), strict=True):
        assert abs(float(said) * 1000 - found[command]) <= 250, found
    for name, most in re.findall(r"\[(\w+\.py)\]\(openrlhf/loop/\1\) has (?:at most )?(\d+)", readme):
        assert len((ROOT / "openrlhf" / "loop" / name).read_text().splitlines()) <= int(most)


def test_imports_stand_at_the_top() -> None:
    """One inside a function is of a package that may be missing, or says what it spares. Lower the number."""
    found = set()
    for file in (ROOT / "openrlhf").rglob("*.py"):
        functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, FUNCTION)]
        inner = [node for function in functions for node in ast.walk(function)]
        found |= {(file, node.lineno) for node in inner if isinstance(node, ast.Import | ast.ImportFrom)}
    assert len(found) <= MOST_INNER_IMPORTS


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Nor for type checkers alone. `openrlhf` and `openrlhf.api` are left out: they hand names on."""
    texts = SIZE["modules"](ROOT)
    known = texts.keys() - {"openrlhf", "openrlhf.api"}
    graph = {}
    for module in known:
        imported = [n for n in ast.walk(ast.parse(texts[module])) if isinstance(n, ast.ImportFrom)]
        names = {f"{n.module}.{alias.name}" for n in imported for alias in n.names}
        graph[module] = known & (names | {n.module for n in imported})
    TopologicalSorter(graph).prepare()  # raises CycleError
