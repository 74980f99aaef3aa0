"""A run that receives a signal or loses a process ends at once, in a few lines, and leaves no process."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from openrlhf.checkpoint.manifest import Manifest
from openrlhf.stopping import EXIT_STOPPED
from openrlhf.tasks.prepare import TaskFiles

BIN = Path(sys.executable).parent
REWARD = Path(__file__).with_name("digits_reward.py")
FOREVER = 100_000


def interrupt(
    command: str, folder: Path, end: Callable[[psutil.Process], object], steps: int = 3
) -> tuple[int, str, str]:
    """Runs `command`, which writes to `folder`/run and joins no cluster, and after some steps ends its
    process with `end`. Returns the exit code and what was written to stdout and stderr; checks that no
    process is left."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    metrics = folder / "run" / "metrics.jsonl"
    with (folder / "out").open("w") as stdout, (folder / "err").open("w") as stderr:
        run = subprocess.Popen(
            shlex.split(command), stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 240
        while not metrics.exists() or metrics.read_text().count("\n") < steps:
            assert run.poll() is None and time.monotonic() < deadline, (folder / "err").read_text()[-3000:]
            time.sleep(0.1)
        process = psutil.Process(run.pid)
        started = process.children(recursive=True)
        end(process)
        code = run.wait(timeout=60)
        assert psutil.wait_procs(started, timeout=20)[1] == []
    finally:
        for process in [*started, run]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
    out, err = (folder / "out").read_text(), (folder / "err").read_text()
    assert "\x1b" not in out + err
    return code, out, err


def rl(task: TaskFiles, folder: Path, flags: str) -> str:
    return (
        f"{sys.executable} -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {task.model} "
        f"--data.prompt_dataset {task.prompts} --reward.remote_url {REWARD} --data.apply_chat_template "
        "--data.max_len 96 --rollout.max_new_tokens 12 --rollout.batch_size 4 "
        "--rollout.n_samples_per_prompt 2 --train.batch_size 8 --algo.advantage.estimator group_norm "
        "--algo.kl.init_coef 0 "
        f"--ds.param_dtype fp32 --train.num_episodes {FOREVER} --train.max_steps {FOREVER} "
        f"--ckpt.output_dir {folder / 'out_dir'} --logger.run_dir {folder / 'run'} {flags}"
    )


def last_checkpoint(folder: Path) -> str:
    path = folder / "out_dir" / "checkpoints" / "_actor"
    return f" {path / (path / 'latest').read_text()}: "


SAVES = "--ckpt.save_steps 1000"
ONE_RANK = "--actor.num_gpus_per_node 1 --train.colocate_all"


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(os.kill, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(os.killpg, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(os.killpg, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_end(task: TaskFiles, tmp_path: Path, send: Callable, number: int) -> None:
    """SIGTERM to the whole group ends Ray's servers too, perhaps before the run has saved."""
    flags = f"{ONE_RANK} --ckpt.save_steps 100"
    ended, _, err = interrupt(rl(task, tmp_path, flags), tmp_path, lambda run: send(run.pid, number))
    (last,) = (line for line in err.splitlines() if line.startswith("stopped "))
    if send is os.killpg and number == signal.SIGTERM and ended == 128 + number:
        assert "--ckpt.save_steps 100 " in last and "--ckpt.load_enable" not in last
        return
    assert ended == EXIT_STOPPED, err[-3000:]
    step = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert f" step {step} of {FOREVER};" in last and last_checkpoint(tmp_path) in last
    assert "--ckpt.load_enable" in last
    assert "Traceback" not in err and "*** " not in err


def kill(title: str) -> Callable[[psutil.Process], None]:
    """Returns a function that kills the last process of the run with this title by `kill -9`."""

    def end(run: psutil.Process) -> None:
        found = [p for p in run.children(recursive=True) if title == p.name() or titled(p, title)]
        found[-1].kill()

    return end


def titled(process: psutil.Process, title: str) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(title)
    except psutil.ZombieProcess:
        return False


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize(
    ("title", "name", "flags"),
    [
        (
            "ray::PolicyWorker",
            "a rank of the policy",
            f"{ONE_RANK} --rollout.engine transformers --train.backend torch",
        ),
        pytest.param("ray::PolicyWorker", "a rank of the policy", ONE_RANK, marks=pytest.mark.slow),
        pytest.param(
            "ray::PolicyWorker",
            "a rank of the policy",
            "--actor.num_gpus_per_node 2 --ckpt.save_steps 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_loses_a_process(task, tmp_path, title, name, flags):
    code, _, err = interrupt(rl(task, tmp_path, flags), tmp_path, kill(title))
    assert code == 1
    *what, log, where, _ = err[err.index("error: ") :].splitlines()
    assert f"{name} died: process " in what[-1] or f"{name} died: the process that " in what[-1]
    # a weight sync may have been under way
    assert len(what) == 1 or what[0].startswith("error: weight sync ")
    assert Path(log.removeprefix("Its log is ").partition(";")[0]).exists()
    saved = "save_steps" in flags
    left = last_checkpoint(tmp_path) if saved else " --ckpt.save_steps N "
    assert where.startswith("in step ") and left in where
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize(
    ("engine", "killed"),
    [
        ("transformers", ("gcs_server",)),
        ("vllm", ("gcs_server",)),
        ("transformers", ("gcs_server", "ray::PolicyWorker")),
    ],
)
def test_a_run_whose_ray_loses_its_head(task, tmp_path, engine, killed):
    """It ends within half a minute, before Ray does, and no process is left. The head is the cause that is
    told, also if another process died."""
    command = rl(task, tmp_path, f"--actor.num_gpus_per_node 1 --rollout.engine {engine}")
    end = lambda run: [kill(title)(run) for title in killed]
    code, _, err = interrupt(command, tmp_path, end, steps=1)
    assert code == 1
    first, log, where = err[err.index("error: ") :].splitlines()
    assert first.startswith("error: Ray's process gcs_server at 127.0.0.1:") and first.endswith(" [cluster]")
    assert Path(log.removeprefix("Its log is ").partition(". ")[0]).exists()
    assert where.startswith("in step ")
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_whose_own_process_is_killed_leaves_none(task: TaskFiles, tmp_path: Path, engine: str) -> None:
    command = rl(task, tmp_path, f"--actor.num_gpus_per_node 1 --rollout.engine {engine}")
    code, _, _ = interrupt(command, tmp_path, psutil.Process.kill, steps=1)
    assert code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        pytest.param(sys.executable, "", marks=pytest.mark.slow),
        pytest.param(sys.executable, SAVES, marks=pytest.mark.slow),
        (f"{BIN / 'torchrun'} --standalone --nproc_per_node 2", SAVES),
    ],
    ids=["python-alone", "python", "torchrun"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_supervised_run_that_is_told_to_end(task, tmp_path, launcher, flags, number):
    """One rank reports it; torchrun adds lines and exit codes of its own."""
    command = (
        f"{launcher} -m openrlhf.cli.train_sft --model.model_name_or_path {task.model} "
        f"--data.dataset {task.pretrain} --model.pretrain_mode_enable --data.max_samples 32 "
        f"--train.batch_size 16 --train.max_epochs {FOREVER} --ds.param_dtype fp32 "
        f"--ckpt.output_dir {tmp_path / 'out_dir'} --logger.run_dir {tmp_path / 'run'} {flags}"
    )
    code, _, err = interrupt(command, tmp_path, lambda run: os.killpg(run.pid, number))
    (said,) = (line for line in err.splitlines() if line.startswith("stopped "))
    if flags:
        step = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
        checkpoint = tmp_path / "out_dir" / "checkpoints" / f"global_step{step}"
        assert f" step {step} of {FOREVER * 2};" in said and f" {checkpoint}: " in said
        assert Manifest.read(checkpoint).damage(checkpoint, hashes=True) is None
    else:
        assert "--ckpt.save_steps N " in said and "--ckpt.load_enable" not in said
    if launcher == sys.executable:
        assert code == (EXIT_STOPPED if flags else 128 + number) and "Traceback" not in err
