"""`openrlhf bisect RUN --commits`: the code of commits, refusals, and the comparison of the results."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from recorded_runs import Recording
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.tools.command_line.jobs import run_job
from openrlhf.tools.replay.commits import ENTRY, Repository
from openrlhf.tools.replay.flags import bisect as main
from openrlhf.tools.replay.replay import bisect_versions
from openrlhf.tools.replay.rerun import Rerun, build_environment

COMPUTE = """\
import json, shutil, sys
from pathlib import Path

command, config, source, start, step = sys.argv[1:]
assert f"save_steps: {{step}}" in Path(config).read_text()
made = Path(config).parent / "run"
shutil.copytree(source, made)
rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
rows[int(step) - 1]["grad_norm"] += {added}
(made / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
{more}
"""
"""Stands in for the process of a replay: writes a run whose last gradient norm is larger, if it was
told to save its last step."""


def git(clone: Path, *words: str) -> str:
    own = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(clone), *own, *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def commit(clone: Path, message: str, name: str, text: str) -> str:
    """Commits a file of the package, and returns the commit's hash."""
    path = clone / "openrlhf" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", message)
    return git(clone, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of which every commit but the first can compute steps again."""
    path = tmp_path / "clone"
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch", "main")
    commit(path, "too old", "__init__.py", "")
    git(path, "tag", "old")
    commit(path, "a folder", "cli/__init__.py", "")
    for name, added in (("good", 0), ("same", 0), ("bad", 2**-20)):
        code = f"{COMPUTE.format(added=added, more='')}# {name}\n"
        commit(path, f"{name} code", "cli/replayed.py", code)
        git(path, "tag", name)
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch) -> Path:
    """The folder of temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "recorded")


def state(clone: Path) -> tuple[str, str, list[str]]:
    """Returns everything of a clone that a checkout would change."""
    files = sorted(str(path) for path in clone.rglob("*"))
    return git(clone, "status", "--porcelain"), git(clone, "worktree", "list"), files


def test_the_first_difference_of_two_commits(recording, clone, temporary, capfd):
    before = state(clone)
    assert bisect_versions(recording.run.path, ["good", "bad"], 2, clone) == 1
    out, err = capfd.readouterr()
    assert "step 2 computed by two commits, from the beginning" in out
    assert f"first run   good ({git(clone, 'rev-parse', 'good')[:12]}): good code" in out
    assert "first difference: step 2, metrics, grad_norm: 1.0 | " in out
    assert "flags and environment: equal" in out
    assert "steps 1 to 2 with bad" in err
    assert state(clone) == before and not list(temporary.iterdir())


@pytest.mark.processes
def test_commits_that_compute_the_same(recording, clone, temporary, capfd):
    sha = git(clone, "rev-parse", "good")
    assert bisect_versions(recording.run.path, [sha, "same"], None, clone / "openrlhf") == 0
    out = capfd.readouterr().out
    assert "step 3 computed by two commits" in out and "no difference" in out
    assert f"first run   {sha[:12]}: good code" in out


@pytest.mark.processes
def test_a_commit_that_fails_is_named(recording, clone, temporary):
    commit(clone, "fails", "cli/replayed.py", COMPUTE.format(added=0, more="sys.exit(3)"))
    with refused(ErrorCode.WORKER_FAILED, flag="--commits", value="main") as raised:
        bisect_versions(recording.run.path, ["good", "main"], 2, clone)
    assert "exit status 3" in str(raised.value)
    assert not list(temporary.iterdir())


def test_unknown_and_old_commits_are_refused_before_anything_is_computed(recording, clone, temporary):
    for name, code in (("nothing", ErrorCode.NOT_FOUND), ("--all", ErrorCode.NOT_FOUND)):
        with refused(code, flag="--commits", value=name):
            bisect_versions(recording.run.path, ["good", name], 2, clone)
    with refused(ErrorCode.UNSUPPORTED, flag="--commits", value="old") as raised:
        bisect_versions(recording.run.path, ["old", "good"], 2, clone)
    assert ENTRY in str(raised.value)
    with refused(ErrorCode.NOT_FOUND, flag="--step", value=9):
        bisect_versions(recording.run.path, ["good", "bad"], 9, clone)
    assert not list(temporary.iterdir())


def test_folders_without_a_repository_are_refused(recording, tmp_path, monkeypatch):
    for folder in (tmp_path / "missing", tmp_path):
        with refused(ErrorCode.NOT_FOUND, flag="--repository", value=folder):
            bisect_versions(recording.run.path, ["good", "bad"], 2, folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(ErrorCode.MISSING_PACKAGE, flag="--commits"):
        bisect_versions(recording.run.path, ["good", "bad"], 2, tmp_path)


def test_a_bare_clone_has_the_same_commits(clone, tmp_path):
    git(clone, "clone", "--quiet", "--bare", str(clone), str(tmp_path / "bare"))
    repository = Repository.around(tmp_path / "bare")
    repository.unpack(repository.commit("bad"), tmp_path / "code")
    assert (tmp_path / "code" / ENTRY).read_bytes() == (clone / ENTRY).read_bytes()


@pytest.mark.processes
def test_the_code_of_a_commit_is_imported_before_that_of_the_working_folder(recording, tmp_path):
    """The working folder of a run is often a clone, whose package `python -m` would import."""
    for folder in ("code", "working"):
        (tmp_path / folder / "openrlhf").mkdir(parents=True)
        (tmp_path / folder / "openrlhf" / "__init__.py").write_text("")
        (tmp_path / folder / "openrlhf" / "where.py").write_text(f"print({folder!r})\n")
    (tmp_path / "working" / "users.py").write_text("print('users')\n")
    environment = build_environment(recording.run, tmp_path / "code")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'working'}"
    with (tmp_path / "log").open("w") as log:
        for module in ("openrlhf.where", "users"):
            assert run_job([module], log, environment=environment, folder=tmp_path / "working") == 0
    assert (tmp_path / "log").read_text() == "code\nusers\n"


def test_a_checkpoint_is_saved_for_the_comparison(recording, tmp_path):
    steps = [
        Rerun(run=recording.run, step=3, folder=tmp_path, saves=saves).settings for saves in (False, True)
    ]
    assert [settings["ckpt.save_steps"] for settings in steps] == [-1, 3]


@pytest.mark.parametrize(
    ("words", "code", "place"),
    [
        ("run", ErrorCode.MISSING_FLAG, "RUN_B"),
        ("run other --commits a b", ErrorCode.CONFLICT, "--commits a b"),
        ("run other --step 3", ErrorCode.CONFLICT, "--step 3"),
        ("run other --repository .", ErrorCode.CONFLICT, "--repository ."),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(words, code, place, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    err = capsys.readouterr().err
    assert err.startswith(f"error: {place}: ") and f"[{code}]" in err
