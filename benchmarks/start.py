"""Seconds from the commands `openrlhf ppo` and `openrlhf sft` to their first steps, on the model of the demo.

Prints the stages of each start, as the run itself reports them, and the CPU seconds (user and system) of each
process until the first step. CPU seconds hardly depend on what else the machine does.

    python benchmarks/start.py
    python benchmarks/start.py --runs 3 --commands sft
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from openrlhf.tasks.prepare import TaskFiles, prepare
from openrlhf.tools.demo.demo import PRETRAIN, RL, SFT_FLAGS

ROLES = {
    "PolicyWorker": "rank of the policy",
    "EngineActor": "engine",
    "VLLM::EngineCore": "vLLM's core",
    "forkserver": "vLLM's core",
    "ray": "Ray",
    "gcs_server": "Ray",
}
"""Part of a process's command line -> its name in the table."""
FIRST_STEP = re.compile(r"\bstep 1/")
POLL = 0.1
"""Seconds between looks at the processes."""


def commands(files: TaskFiles, folder: Path) -> dict[str, str]:
    """Returns the flags of each command."""
    return {
        "ppo": (
            f"--actor.model_name_or_path {files.model} --data.prompt_dataset {files.prompts} "
            f"--reward.remote_url {files.reward} --train.max_steps 1 --ckpt.output_dir {folder / 'policy'} "
            f"--logger.run_dir {folder / 'rl'} {RL}"
        ),
        "sft": (
            f"--model.model_name_or_path {files.model} --model.pretrain_mode_enable "
            f"--data.dataset {files.pretrain} --data.max_samples 64 --ckpt.output_dir {folder / 'base'} "
            f"--logger.run_dir {folder / 'sft'} {PRETRAIN} {SFT_FLAGS}"
        ),
    }


class Processes:
    """CPU seconds of a process and all that it starts."""

    def __init__(self, root: int) -> None:
        self.root, self.seconds, self.names = root, dict[int, float](), dict[int, str]()
        self.ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.ended.wait(POLL):
            self.look()

    def look(self) -> None:
        try:
            root = psutil.Process(self.root)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                times, words = process.cpu_times(), process.cmdline()
            except psutil.Error:
                continue
            self.seconds[process.pid] = times.user + times.system
            if words and process.pid != self.root:
                self.names[process.pid] = " ".join(words)

    def by_role(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for pid, seconds in self.seconds.items():
            command = self.names.get(pid, "")
            role = next((role for part, role in ROLES.items() if part in command), "others")
            found["driver" if pid == self.root else role] += seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(command: str, flags: str) -> str:
    """Runs the command until its first step. Returns its row of the table."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.main", command, *shlex.split(flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"},
    )
    processes, lines, start, row = Processes(process.pid), list[str](), "", ""
    for line in process.stdout or ():
        lines.append(line)
        if found := re.search(r"started in \d+ s \((.*)\)", line):
            start = found[1]
        if FIRST_STEP.search(line) and not row:
            seconds = time.monotonic() - began
            processes.look()
            roles = processes.by_role()
            parts = ", ".join(f"{role} {cpu:.1f}" for role, cpu in roles.items())
            row = f"| {command} | {seconds:.1f} | {start} | {sum(roles.values()):.1f} | {parts} |"
    processes.ended.set()
    if process.wait() or not row:
        sys.exit("".join(lines[-30:]))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2, help="runs of each command (default: 2)")
    parser.add_argument("--commands", nargs="+", choices=("ppo", "sft"), default=["ppo", "sft"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = prepare(folder / "task", seed=0, num_pretrain=200, num_sft=200, num_prompts=64, num_eval=16)
        print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n", flush=True)
        print(
            "| command | seconds to the first step | stages | CPU seconds | of these |\n|---|---|---|---|---|"
        )
        for run in range(options.runs):
            for command in options.commands:
                print(measure(command, commands(files, folder / str(run))[command]), flush=True)


if __name__ == "__main__":
    main()
