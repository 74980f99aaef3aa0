"""tools/check_prose.py, the check of `make lint` for docstrings without a subject."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "tools" / "check_prose.py"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What a module holds."""\n', ["1: the docstring begins with 'What'"]),
        ('def size():\n    """\nOf a row."""\n', ["2: the docstring begins with 'Of'"]),
        ('class Row:\n    size: int\n    """Those of a row."""\n', ["3: the docstring begins with 'Those'"]),
        ('async def run(): "Which, in turn."\nx = 1\n"Who: it."', ["1: the docstring", "3: the docstring"]),
    ],
)
def test_a_fragment_is_found_with_its_line(tmp_path: Path, source: str, found: list[str]) -> None:
    file = tmp_path / "package" / "module.py"
    file.parent.mkdir()
    file.write_text(source)
    done = check(tmp_path)
    lines = sorted(done.stderr.splitlines())
    assert done.returncode == 1 and len(lines) == len(found)
    for line, problem in zip(lines, found, strict=True):
        assert line.startswith(f"{file}:{problem}")


def test_sound_docstrings_pass(tmp_path: Path) -> None:
    source = '"""Number of tokens."""\nx = "What is no docstring"\n\ndef f():\n    """Whatever."""\n    ""\n'
    (tmp_path / "module.py").write_text(source)
    assert check(tmp_path).returncode == 0
