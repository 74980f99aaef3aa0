"""Programs beside the package: each imports, so that a name that moved is found here."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path.relative_to(ROOT) for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_it_imports(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / program.parent)  # as Python does for a program
    assert callable(runpy.run_path(str(ROOT / program), run_name="imported")["main"])
