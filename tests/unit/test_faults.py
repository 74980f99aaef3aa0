"""Faults at named points of a run."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest
from refusals import refused

from openrlhf import faults
from openrlhf.checkpoint.folder import UNFINISHED, CheckpointFolder
from openrlhf.config.sections import CkptConfig
from openrlhf.errors import ErrorCode
from openrlhf.faults import KINDS, POINTS, VARIABLE, fault

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_visits(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    faults._visits.clear()


def test_without_the_variable_nothing_happens(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not fault("step.loss") and not faults._visits


def test_a_fault_occurs_at_its_visit_and_rank(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "step.loss:nan@2, step.loss:nan@4#1, save.file:enospc, sync.send:raise")
    assert [fault("step.loss") for _ in range(5)] == [False, True, False, False, False]
    with pytest.raises(OSError) as full:
        fault("save.file")
    assert full.value.errno == errno.ENOSPC
    assert not fault("save.file"), "once"
    with pytest.raises(RuntimeError, match=r"sync\.send"):
        fault("sync.send")
    monkeypatch.setenv("RANK", "1")
    faults._visits.clear()
    assert [fault("step.loss") for _ in range(5)] == [False, True, False, True, False]


def test_a_pause(monkeypatch) -> None:
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    monkeypatch.setenv(VARIABLE, "save.file:sleep=1.5")
    assert not fault("save.file") and slept == [1.5]


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_that_ends_or_hangs(monkeypatch, kind: str, number: int) -> None:
    sent = []
    monkeypatch.setattr(faults.os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setenv(VARIABLE, f"sync.load:{kind}")
    fault("sync.load")
    assert sent == [(os.getpid(), number)]


@pytest.mark.parametrize(
    "text", ["step:nan", "step.loss:melt", "step.loss", "step.loss:nan@", "step.loss:nan@x", "save.file:nan"]
)
def test_what_is_no_fault(text: str) -> None:
    with refused(ErrorCode.INVALID_VALUE, flag=VARIABLE, value=text):
        faults.faults(f"save.file:kill,{text}")


def test_the_page_lists_points_and_kinds() -> None:
    page = (ROOT / "docs" / "structure.md").read_text().partition("\n## Faults\n")[2]
    assert dict(re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", page, re.MULTILINE)) == POINTS | KINDS


def test_every_point_is_visited() -> None:
    visited: list[str] = []
    for file in (ROOT / "openrlhf").rglob("*.py"):
        visited += re.findall(r'\bfault\("([a-z_.]+)"\)', file.read_text())
    assert sorted(visited) == sorted(POINTS)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("save.before_rename", "global_step1"),
        ("save.between_models", "global_step1"),
        ("save.after_rename", "global_step2"),
        ("save.rotate", "global_step2"),
    ],
)
@pytest.mark.parametrize("pointer", ["as it is", "missing"])
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(tmp_path, monkeypatch, point, expected, pointer):
    def run() -> CheckpointFolder:
        ckpt = CkptConfig(path=str(tmp_path), max_num=1)
        return CheckpointFolder(str(tmp_path / "_actor"), ckpt, [str(tmp_path / "_critic")])

    def save(folder: CheckpointFolder, tag: str) -> None:
        with folder.saving(tag):
            for place in folder.folders:
                (place / UNFINISHED / tag).mkdir(parents=True)
                (place / UNFINISHED / tag / "weights").write_text(tag)

    save(run(), "global_step1")
    monkeypatch.setenv(VARIABLE, f"{point}:raise")
    with pytest.raises(RuntimeError, match=re.escape(point)):
        save(run(), "global_step2")
    if pointer == "missing":
        (tmp_path / "_actor" / "latest").unlink()
    elif point == "save.after_rename":
        expected = "global_step1"  # the one that `latest` names is whole too
    found = run().find().tag
    assert found == expected
    for model in ("_actor", "_critic"):
        assert (tmp_path / model / found / "weights").read_text() == found
    monkeypatch.delenv(VARIABLE)
    save(run(), "global_step3")
    assert run().find().tag == "global_step3"
