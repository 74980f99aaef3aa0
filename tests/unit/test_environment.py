"""What make installs and starts on a machine with GPUs: the environment, the demo, the tests."""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf import device
from openrlhf.cli import demo

ROOT = Path(__file__).parents[2]
NO_DRIVER_FOR_IT = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("cuda", "needed"), [("13.0", "580 or newer"), ("12.8", "525 or newer")])
def test_a_driver_that_is_too_old_is_named(tmp_path, monkeypatch, cuda: str, needed: str) -> None:
    """torch would compute on the CPU, in silence."""
    refuse = f"import sys; print('2.13.0 {cuda}'); sys.exit({NO_DRIVER_FOR_IT!r})"
    program(tmp_path / "python", refuse)
    program(tmp_path / "nvidia-smi", "print('535.104.05')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check = runpy.run_path(str(ROOT / "tools" / "environment.py"))["check_gpu"]
    monkeypatch.setitem(check.__globals__, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit) as stop:
        check()
    assert str(stop.value).splitlines() == [
        f"error: torch 2.13.0, built for CUDA {cuda}, finds no GPU that it can use by driver 535.104.05:",
        NO_DRIVER_FOR_IT,
        f"CUDA {cuda} needs driver {needed}. Install it and run this again.",
    ]
    program(tmp_path / "python", "")
    check()


def test_the_demo_takes_half_of_the_memory_that_is_free(monkeypatch) -> None:
    assert demo._engine_memory() == ""
    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    assert demo._engine_memory() == " --vllm.gpu_memory_utilization 0.12"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 80 << 30))
    with pytest.raises(ValueError, match=r"needs 4 GiB of a GPU's memory, and 3.0 of 80 are free"):
        demo._engine_memory()


@pytest.mark.parametrize(
    ("asked", "visible"),
    [
        (["tests/unit/test_mesh.py"], ""),
        (["tests"], ""),
        ([], ""),
        (["tests/gpu/test_kernels.py", "tests/unit/test_mesh.py"], ""),
        (["tests/gpu"], "0"),
        (["tests/gpu/test_runs.py::test_hybrid_engine_on_one_gpu"], "0"),
    ],
)
def test_only_the_tests_of_gpus_see_one(monkeypatch, asked: list[str], visible: str) -> None:
    """And the others none, whatever the machine has: they start more ranks than GPUs."""
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})
    configure = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["pytest_configure"]
    args = asked or [str(ROOT / "tests")]  # as pytest has it by `testpaths`
    configure(SimpleNamespace(args=args, invocation_params=SimpleNamespace(dir=ROOT)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
