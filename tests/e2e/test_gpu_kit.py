"""The GPU kit on a CPU: it ends by itself and in time with all that it learned, whatever its stages do."""

import json
import os
import runpy
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
KIT = str(ROOT / "benchmarks" / "gpu.py")
FAULTY = [
    *("raises", "hangs", "prints", "crashes", "stays", "killed", "leaves", "floods", "lacks"),
    *("broken-package", "nameless-package", "carried", "no-module", "good"),
]


def kit(out: Path, *words: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Runs the kit and returns the process and the stages of its report by name."""
    command = [sys.executable, KIT, "--out", str(out), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | variables, cwd=out.parent
    )
    report = json.loads((out / "gpu_report.json").read_text())
    return done, {stage["stage"]: stage for stage in report["stages"]}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns variables that give the kit the faulty stages, and wheels that were carried along."""
    carried = tmp_path_factory.mktemp("carried")
    (carried / "carried_along.py").write_text("RATE = 6.0\n")
    (carried / "broken_package.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    )
    (carried / "nameless_package.py").write_text(
        "raise ModuleNotFoundError('could not import a part of it')\n"
    )
    path = f"{carried}{os.pathsep}{Path(__file__).parent}"
    return {"GPUKIT_STAGES": "faulty_gpu_stages", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory, faulty: dict[str, str]):
    """Runs all faulty stages. Returns the kit's folder, its process and its stages, see `kit`, and the
    seconds that it took."""
    out, start = tmp_path_factory.mktemp("faulty") / "out", time.monotonic()
    return out, *kit(out, "--rehearse", *FAULTY, **faulty), time.monotonic() - start


@pytest.mark.slow
def test_no_stage_ends_the_kit(faulty_run) -> None:
    out, done, stages, seconds = faulty_run
    assert seconds < 200
    assert done.returncode == 1 and list(stages) == FAULTY
    assert not done.stderr
    for name, outcome, said in [
        ("raises", "fail", "AssertionError: sampler and trainer differ by 0.5 nats"),
        ("hangs", "fail", "stopped after 8 s; stacks.txt says where: "),
        ("prints", "pass", ""),
        ("crashes", "pass", "reported its figures, then ended by signal 11"),
        ("stays", "pass", "reported its figures, but did not end within 8 s; stacks.txt says why"),
        ("killed", "fail", "ended by signal 9: about to need all memory"),
        ("leaves", "fail", "ended with exit code 7: it printed nothing"),
        ("floods", "pass", ""),
        ("lacks", "skip", "a_package_that_nobody_has is not installed"),
        ("broken-package", "fail", "ImportError: libcudart.so.13: cannot open shared object file"),
        ("nameless-package", "fail", "ModuleNotFoundError: could not import a part of it"),
        ("carried", "pass", ""),
        ("no-module", "fail", "ModuleNotFoundError: No module named 'nowhere'"),
        ("good", "pass", ""),
    ]:
        assert (stages[name]["outcome"], stages[name]["reason"][: len(said)]) == (outcome, said), stages[name]
    rates = [stages[name]["figures"].get("rate") for name in FAULTY if stages[name]["outcome"] == "pass"]
    assert rates == [2.0, 3.0, 4.0, 5.0, 6.0, 1.0]
    page = (out / "gpu_report.md").read_text()
    assert all(f"| `{name}` | {stages[name]['outcome']} |" in page for name in FAULTY)


@pytest.mark.slow
def test_output_and_stacks_of_what_was_stopped_are_kept(faulty_run) -> None:
    out, *_ = faulty_run
    stacks = (out / "stacks.txt").read_text()
    assert "in hangs_here" in stacks and "time.sleep(600)" in stacks  # a stack frame, and the child's command
    logs = (out / "logs.txt").read_text()
    for text in ("began", "a child", "the flood begins", "line 29", "all is well", "[cut]"):
        assert text in logs, text
    files = list(out.iterdir())
    assert len(files) == 4 and max(file.stat().st_size for file in files) < 2 * 2**20
    everything = b"".join(
        (p / "cmdline").read_bytes() for p in Path("/proc").glob("[0-9]*") if (p / "cmdline").exists()
    )
    assert b"a child" not in everything


def test_a_killed_kit_leaves_what_was_found(tmp_path: Path, faulty: dict[str, str]) -> None:
    out = tmp_path / "out"
    command = [sys.executable, KIT, "--rehearse", "--out", str(out), "good", "hangs", "raises"]
    with subprocess.Popen(command, env=os.environ | faulty, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (under_way := out / "under_way.log").exists() or b"began" not in under_way.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
    assert "began" in (out / "under_way.log").read_text()
    (stage,) = json.loads((out / "gpu_report.json").read_text())["stages"]
    assert (stage["stage"], stage["outcome"]) == ("good", "pass")


def test_a_budget_stops_and_leaves_out(tmp_path: Path, faulty: dict[str, str]) -> None:
    """The stage under way gets what is left of the budget; the others report that nothing was left."""
    start = time.monotonic()
    words = ("--rehearse", "--budget", "20", "good", "hangs-long", "raises")
    _, stages = kit(tmp_path / "out", *words, **faulty)
    assert time.monotonic() - start < 60
    assert [stage["outcome"] for stage in stages.values()] == ["pass", "fail", "skip"]
    assert "--budget" in stages["raises"]["reason"]


def test_gpus_that_are_missing(tmp_path: Path, faulty: dict[str, str]) -> None:
    done, stages = kit(tmp_path / "out", "two-gpus", "good", **faulty)
    assert stages["two-gpus"]["reason"] == "needs 2 GPUs, 0 there"
    assert done.returncode == 0


def test_a_watch_of_memory_ends_with_what_it_watched(tmp_path: Path, faulty: dict[str, str]) -> None:
    """The nvidia-smi of this test never ends by itself."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\nwhile true; do echo 1024; sleep 0.1; done\n")
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    _, stages = kit(tmp_path / "out", "memory", **faulty, PATH=path)
    assert stages["memory"]["reason"] == "AssertionError: exit code 1: openrlhf ppo ..."
    assert stages["memory"]["seconds"] < 190, "it hung until it was stopped"


def test_a_machine_without_torch(tmp_path: Path) -> None:
    """A Python with its standard library alone reports the machine and why the other stages are skipped."""
    base = str(Path(sys.base_prefix, "bin", "python3"))
    command = [base, KIT, "--out", str(tmp_path / "out"), "facts", "kernels"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
    )
    facts, kernels = json.loads((tmp_path / "out" / "gpu_report.json").read_text())["stages"]
    assert done.returncode == 0 and facts["figures"]["driver"] == "none that answers"
    assert (kernels["outcome"], kernels["reason"]) == ("skip", "torch is not installed")


@pytest.mark.slow
def test_a_kernel_that_fails_is_no_slow_reading(tmp_path: Path, faulty: dict[str, str]) -> None:
    _, stages = kit(tmp_path / "out", "--rehearse", "broken-kernel", **faulty)
    assert stages["broken-kernel"]["outcome"] == "fail", stages
    assert "enable_gqa" in stages["broken-kernel"]["reason"]


def needed_by(*names: str) -> set[str]:
    """Returns the names of installed distributions that these depend on, and their own."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        found.add(name)
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_a_machine_with_torch_and_the_wheels(tmp_path: Path) -> None:
    """Neither an index, make, an installed openrlhf, Ray nor vLLM is there: the kit runs with any Python
    whose packages are torch, transformers and those wheels."""
    site = tmp_path / "site"
    site.mkdir()
    packages = ("torch", "transformers", "deepspeed", "datasets", "aiohttp", "peft", "jinja2")
    for name in needed_by(*packages, "cloudpickle", "pillow"):
        for file in distribution(name).files or []:
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    runpy.run_path(str(ROOT / "tools" / "gpu_wheels.py"))["carry_packing"](tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    base = str(Path(sys.base_prefix, "bin", "python3"))
    command = [base, KIT, "--rehearse", "--out", str(tmp_path / "out"), "facts", "ipc", "sft-0.6B", "hybrid"]
    variables = {
        "PYTHONPATH": str(site),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables, cwd=tmp_path)
    stages = json.loads((tmp_path / "out" / "gpu_report.json").read_text())["stages"]
    assert [stage["outcome"] for stage in stages] == ["pass", "pass", "pass", "skip"], done.stdout
    assert stages[0]["figures"]["torch"] == torch.__version__
    assert stages[3]["reason"].startswith("ray ")


REHEARSED = [
    *("collectives", "waits", "prefixes", "optimizer", "sft-0.6B", "sft-4B-checkpointing", "rl-0.6B"),
    *("rl-4B-lora", "ipc", "hybrid", "partial", "kept-cache", "async", "adapters", "kept-sets", "routing"),
    *("separate", "rollout", "trl-sft", "floor"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_stage_rehearsed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, KIT, "--rehearse", "--out", str(out), "--limit", "400", *REHEARSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + (out / "logs.txt").read_text()[-5000:]
    assert done.stdout.count("PASS") == len(REHEARSED), done.stdout
