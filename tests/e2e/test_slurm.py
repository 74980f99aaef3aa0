"""train_nonrl_slurm.sh on two nodes, which are two tasks on this machine: torchrun and training are real."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces
from processes import port_for_later

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "scontrol": "printf 'localhost\\n%.0s' 1 2\n",
    # One task stands for each node. The second node has a disk of its own at $OWN.
    "srun": """while [[ $1 == -* ]]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
export SLURM_PROCID=1
unshare --mount --user --map-root-user bash -c 'mount -t tmpfs none "$OWN" && exec "$@"' task "$@" &
wait $! && wait $first
""",
}
TINY = (
    "--data.input_key input --data.output_key output --data.max_len 128 --data.max_samples 32 "
    "--train.max_steps 2 --train.batch_size 8 --train.micro_batch_size 2 --ds.param_dtype fp32 "
    "--ds.zero_stage 3 --ckpt.save_steps 1"
)


def submit(task: TaskFiles, folder: Path, *flags: str) -> tuple[int, str]:
    """Runs the script as SLURM does; returns (exit code, what was printed)."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    of_slurm = {"JOB_ID": "7", "JOB_NODELIST": "node-[0-1]", "NNODES": "2", "GPUS_ON_NODE": "1"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in of_slurm.items()}
    environment |= {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PORT": str(port_for_later()),
        "MODEL": str(task.model),
        "DATASET": str(task.sft),
        "OUT": str(folder / "out"),
        "OWN": str(folder / "own"),
    }
    command = ["bash", "examples/scripts/train_nonrl_slurm.sh", *TINY.split(), *flags]
    to_one = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, **to_one)
    return done.returncode, done.stdout


@pytest.mark.slow
@needs_namespaces
def test_a_supervised_recipe_on_two_nodes(task: TaskFiles, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    code, output = submit(task, tmp_path, "--ckpt.path", f"{tmp_path}/own/ckpt")
    assert code != 0, output
    assert re.search(rf"error: --ckpt\.path {tmp_path}/own/ckpt: .*\b{platform.node()}\b", output)

    code, output = submit(task, tmp_path)
    assert code == 0, output
    (metrics,) = (tmp_path / "out").glob("runs/*/metrics.jsonl")
    assert [*read_metrics(metrics)] == [1, 2]
    assert len([*(tmp_path / "out" / "checkpoints" / "global_step2").glob("*_optim_states.pt")]) == 2
    assert (tmp_path / "out" / "config.json").exists()
