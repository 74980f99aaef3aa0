"""Programs outside of the package can be imported, so a module or name that moved is noticed here."""

import importlib
import inspect
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path.relative_to(ROOT) for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py")
)
PARTS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("gpukit", "reproducible")
    for path in (ROOT / "benchmarks" / folder).glob("*.py")
)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_it_imports(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / program.parent)  # Python does the same for a program that it runs
    assert callable(runpy.run_path(str(ROOT / program), run_name="imported")["main"])


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_programs_import(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("recipes", "tools", "benchmarks"):  # `reproducible` adds them when it is first imported
        monkeypatch.syspath_prepend(ROOT / folder)
    importlib.import_module(part)


def test_stages_name_functions_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages name functions that exist and accept the options that they are given."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name, stage in importlib.import_module("gpukit.stages").STAGES.items():
        module, _, function = stage.work.partition(":")
        work = getattr(importlib.import_module(module), function)
        assert inspect.signature(work).bind(None, **stage.options), name


def test_a_stage_without_its_model_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    inside, stage = (importlib.import_module(f"gpukit.{name}") for name in ("inside", "stage"))
    monkeypatch.setattr(inside, "ROOT", tmp_path)
    learns = stage.Stage(shows="", work="", model="ckpt/smollm2")
    setting = stage.Setting(rehearsal=True)
    assert "openrlhf fetch smollm2 --output ckpt/smollm2" in inside._missing(learns, setting)
    (tmp_path / "ckpt" / "smollm2").mkdir(parents=True)
    assert inside._missing(learns, setting) == ""
