"""The diffs of docs/extending.md apply to today's sources, and what they add works."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from openrlhf.algorithms.advantages.base import StepView
from openrlhf.algorithms.policy_losses.base import RowView
from openrlhf.rewards.function import check_reward_file

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
SOURCES = (
    "openrlhf",
    "docs/algorithms.md",
    "tools/named_algorithms.py",
    "tests/unit/algorithms/test_traits.py",
    "tests/unit/algorithms/test_algorithms.py",
    "tests/helpers/records.py",
)


@pytest.mark.parametrize("view", [StepView, RowView])
def test_every_field_of_a_view_is_described(view: type) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    rows = page.partition(f"| field of `{view.__name__}` |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(field.name for field in fields(view))


def files_of(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)


def apply(diff: str, folder: Path) -> None:
    """Applies a diff to a folder outside of a repository, which git then takes for its root."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=folder, env=environment, check=True)


def test_an_estimator_and_a_loss_are_one_new_file() -> None:
    changed = [[name for name in files_of(diff) if name.startswith("openrlhf/")] for diff in DIFFS]
    new = "openrlhf/algorithms/advantages/group_mad.py", "openrlhf/algorithms/policy_losses/spo.py"
    assert changed == [*([name] for name in new), [], [], []]
    assert all(f"--- /dev/null\n+++ b/{name}" in diff for name, diff in zip(new, DIFFS, strict=False))


def test_the_code_that_the_diffs_add_works(tmp_path: Path) -> None:
    """With all diffs applied, their own tests pass, and so do the tests of all algorithm rows and of the
    formula page."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for diff in DIFFS:
        apply(diff, tmp_path)
    added = [name for diff in DIFFS for name in files_of(diff) if Path(name).name.startswith("test_")]
    assert len(added) == len(DIFFS) == 5
    tests = [*added, *(name for name in SOURCES if Path(name).name.startswith("test_"))]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path}/tests/helpers"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert check_reward_file(str(tmp_path / "reward.py"), "--reward.remote_url") == ""
