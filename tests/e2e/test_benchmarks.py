"""Every benchmark runs at its smallest size; each checks that the ways it compares do the same work."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_is_here() -> None:
    names = {"agents", "balance", "controller", "demo", "gpu", "parallel", "prefixes", "reproduce", "rl_step"}
    names |= {"checkpoint", "plan", "recipes", "rollout", "start", "supervised", "view", "weight_sync"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == names


SMALLEST = ["--rows", "4", "--batch_size", "2", "--rounds", "1"]


@pytest.mark.slow
def test_supervised() -> None:
    command = [sys.executable, str(BENCHMARKS / "supervised.py"), *SMALLEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^SFT: 4 samples, \d+ tokens, 1 rounds$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^bare +\d+ ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_start() -> None:
    command = [sys.executable, str(BENCHMARKS / "start.py"), "--runs", "1", "--commands", "sft"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^\| sft \| [\d.]+ \| checks \d+, .* \| driver ", done.stdout, re.MULTILINE), (
        done.stdout
    )


@pytest.mark.slow
def test_recipes() -> None:
    command = [sys.executable, str(BENCHMARKS / "recipes.py"), "--recipes", "sft"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^sft +\d+ s +\d+ s +\d+ s  sft/loss ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_demo() -> None:
    command = [sys.executable, str(BENCHMARKS / "demo.py"), "--seeds", "1", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^1 +\d+  accuracy \d+\.\d -> \d+\.\d %, ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^\| tokens per answer \| \d+ \| \d+ \|$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_checkpoint() -> None:
    command = [sys.executable, str(BENCHMARKS / "checkpoint.py"), "--mb", "16", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^hashed +\d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_balance() -> None:
    command = [sys.executable, str(BENCHMARKS / "balance.py"), "--largest", "128", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "| 128 | 8 | bimodal | 1.0" in done.stdout


@pytest.mark.slow
def test_prefixes() -> None:
    sizes = "--hidden 64 --layers 1 --rounds 1 --shapes demo nothing"
    command = [sys.executable, str(BENCHMARKS / "prefixes.py"), *sizes.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "| demo | 219 / 408 |" in done.stdout and "| nothing | 1024 / 1024 |" in done.stdout


@pytest.mark.slow
def test_plan() -> None:
    command = [sys.executable, str(BENCHMARKS / "plan.py"), "--sizes", "1M"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^largest error: \d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_parallel() -> None:
    command = [sys.executable, str(BENCHMARKS / "parallel.py"), "--tokens", "256", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(re.findall(r"^\| (?:one sequence|short ones) \| [24] \|", done.stdout, re.MULTILINE)) == 16


def test_controller() -> None:
    sizes = ["--samples", "16", "--tokens", "32", "--rounds", "1"]
    command = [sys.executable, str(BENCHMARKS / "controller.py"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"^ours / floor: \d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_reproduce(knowing, tmp_path: Path) -> None:
    """Two runs of a quick row write equal weights, and solve more than the model that they start with."""
    for name in ("one", "other"):
        folder = tmp_path / name / "tiny" / "seed0"
        folder.mkdir(parents=True)
        (folder / "sft").symlink_to(knowing.chat)
        (folder / "task").symlink_to(knowing.files.prompts.parent)
        options = f"--row tiny-words-grpo --seed 0 --folder {tmp_path / name} --results {tmp_path / name}"
        command = [sys.executable, str(BENCHMARKS / "reproduce.py"), *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    one, other = (
        json.loads((tmp_path / name / "tiny-words-grpo.json").read_text())["0"] for name in ("one", "other")
    )
    assert one["weights"] == other["weights"]
    assert one["after"]["total"] == 256 and one["after"]["solved"] > one["before"]["solved"] + 60


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_rl_step() -> None:
    sizes = "--prompts 2 --samples 4 --steps 2 --warmup 1 --rounds 1 --threads 1 --max_new_tokens 8"
    command = [sys.executable, str(BENCHMARKS / "rl_step.py"), "--model", "small", *sizes.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for way in ("ours", "unchecked", "async", "partial", "trl", "floor"):
        assert re.search(rf"^{way} +1 .* [78]\.\d +\d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_rollout(tmp_path: Path) -> None:
    sizes = ["--prompts", "2", "--samples", "2", "--max_new_tokens", "8", "--repeats", "1"]
    run_ranks([str(BENCHMARKS / "rollout.py"), *sizes], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text()
    assert "2 prompts x 2 samples" in printed and "ours / bare:" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_weight_sync(tmp_path: Path) -> None:
    sizes = ["--sizes", "1", "--dtypes", "bf16", "--engines", "2", "--rounds", "2"]
    run_ranks([str(BENCHMARKS / "weight_sync.py"), *sizes], log=tmp_path / "log")
    assert re.search(r"^ +1M +bf16 +2 +2 +0\.", (tmp_path / "log").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_agents(tmp_path: Path) -> None:
    sizes = "--episodes 4 --latency 0 5 --turns 2 --max_new_tokens 4 --rounds 1 --calls 3"
    run_ranks([str(BENCHMARKS / "agents.py"), *sizes.split()], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text()
    assert len(re.findall(r"tokens/s   of bare \d", printed)) == 6, printed
    assert "one call of one token, median of 3: engine" in printed
