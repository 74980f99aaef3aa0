"""Wheels for a machine without an index. tests/e2e/test_gpu_kit.py shows that it needs no others."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "tools"))
import gpu_wheels

METADATA = """Metadata-Version: 2.4
Name: pydantic
Version: 2.14.3
Requires-Dist: annotated-types>=0.6.0
Requires-Dist: pydantic-core==2.50.4
Requires-Dist: email-validator>=2.0.0; extra == 'email'
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the calls of pip; its downloads of pydantic run for real."""
    calls = []

    def pip(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess:
        calls.append(command[3:])
        if "pydantic" in command:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "pydantic-2.14.3-py3-none-any.whl", "w") as wheel:
                wheel.writestr("pydantic-2.14.3.dist-info/METADATA", METADATA)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_wheels.subprocess, "run", pip)
    return calls


def test_what_is_gathered(asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled parts are for the other machine's Python, and of the version that pydantic pins."""
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "--python", "3.13", "--also", "pytest", str(tmp_path)])
    gpu_wheels.main()
    names = [word for call in asked for word in call if not word.startswith("-")]
    for name in (
        "hjson",
        "deepspeed==",
        "annotated-types",
        "typing-inspection",
        "pytest",
        "pydantic-core==2.50.4",
        "datasets",
        "multiprocess",
    ):
        assert any(word.startswith(name) for word in names), name
    compiled = asked[-1]
    assert compiled[compiled.index("--python-version") + 1] == "3.13"
    assert "manylinux_2_17_x86_64" in compiled and "--only-binary=:all:" in compiled
    assert asked[0][0] == "wheel" and "--no-deps" in asked[0]


def test_a_folder_with_wheels_is_refused(asked, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "hjson-3.0-py3-none-any.whl").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_wheels.main()
    assert str(tmp_path) in capsys.readouterr().err and not asked


def test_a_pip_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = lambda command, env: subprocess.CompletedProcess(command, 1)
    monkeypatch.setattr(gpu_wheels.subprocess, "run", failed)
    with pytest.raises(SystemExit, match=r"error: pip wheel "):
        gpu_wheels.gather(tmp_path, "3.12", [])
