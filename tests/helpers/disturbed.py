"""Runs whole jobs that are killed or told to stop at random moments and resumed until they end, and compares
their samples, metrics and weights with those of an undisturbed job."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import processes
import psutil
from judged_answers import TaskFiles

from openrlhf.checkpoint.folder import UNFINISHED, CheckpointFolder
from openrlhf.config.sections import CkptConfig
from openrlhf.faults import VARIABLE
from openrlhf.observability.journal import read_journal
from openrlhf.stopping import EXIT_STOPPED

REWARD = Path(__file__).parents[1] / "e2e" / "digits_reward.py"
POINTS = ("save.file", "save.before_rename", "save.after_rename", "save.rotate")
"""Points of a save (openrlhf/faults.py) at which a job is killed."""
LIMIT = 300.0
"""Seconds within which a job has to take its next step."""
SUPERVISED = (
    "--model.model_name_or_path {model} --data.apply_chat_template --data.max_len 96 --train.batch_size 4 "
    "--train.micro_batch_size 4 --data.max_samples 24 --train.max_epochs 1000 --adam.lr 1e-2 "
    "--ds.param_dtype fp32 --ds.zero_stage 2 --ds.lora.rank 4 --ds.lora.dropout 0.5 "
)
RL = (
    "--actor.model_name_or_path {model} --data.prompt_dataset {prompts} --reward.remote_url {reward} "
    "--data.apply_chat_template --data.max_len 96 --rollout.max_new_tokens 12 --rollout.batch_size 4 "
    "--rollout.n_samples_per_prompt 2 --train.batch_size 8 --algo.advantage.estimator group_norm "
    "--algo.kl.init_coef 0 --actor.adam.lr 1e-3 --ds.param_dtype fp32 --train.num_episodes 100000 "
    "--actor.num_gpus_per_node 1 "
)
FLAGS = {
    "sft": "train_sft --data.dataset {sft} --data.output_key output " + SUPERVISED,
    "dpo": "train_dpo --data.dataset {pairs} --data.prompt_key prompt " + SUPERVISED,
    "rm": "train_rm --data.dataset {pairs} --data.prompt_key prompt " + SUPERVISED,
    "sft saving later": "train_sft --ckpt.async_save --data.dataset {sft} --data.output_key output "
    + SUPERVISED,
    "ppo": "train_ppo_ray --train.colocate_all " + RL,
    "async ppo": "train_ppo_ray --train.async_enable --train.async_queue_size 1 " + RL,
}
"""Maps each kind of job to its module in openrlhf/cli and its flags."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training command and the folder of its files."""

    kind: str
    task: TaskFiles
    folder: Path
    steps: int
    more: str = ""
    """Further flags."""

    def command(self) -> list[str]:
        """Returns the module and its flags."""
        names = {name: getattr(self.task, name) for name in ("model", "sft", "pairs", "prompts")}
        flags = (FLAGS[self.kind] + self.more).format(**names, reward=REWARD)
        places = f"--ckpt.output_dir {self.folder / 'out'} --logger.run_dir {self.folder / 'run'}"
        saving = "--ckpt.save_steps 2 --ckpt.max_num 2 --ckpt.load_enable"
        return shlex.split(f"openrlhf.cli.{flags} {places} {saving} --train.max_steps {self.steps}")

    def start(self, faults: str = "") -> "Started":
        """Starts the command. `faults`: the value of OPENRLHF_FAULT."""
        log = self.folder / "log"
        variables = {"OMP_NUM_THREADS": "1"} | ({VARIABLE: faults} if faults else {})
        if self.is_rl:  # Ray in a process of its own, as for users
            command = [sys.executable, "-m", *self.command()]
            environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | variables
            with log.open("ab") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, env=environment, start_new_session=True
                )
            return Started(process.pid, process.poll, self)
        forked = processes.start(self.command(), log, variables)
        return Started(forked.pid, lambda: forked.exitcode, self)

    @property
    def is_rl(self) -> bool:
        return "ppo" in self.kind

    @property
    def checkpoints(self) -> Path:
        return self.folder / "out" / "checkpoints" / ("_actor" if self.is_rl else "")

    def rows(self) -> list[bytes]:
        """Returns the complete rows of the metrics' file."""
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_bytes().split(b"\n")[:-1] if file.exists() else []

    def is_saving(self) -> bool:
        """Tells whether an unfinished checkpoint is there."""
        return (self.checkpoints / UNFINISHED).exists() or (
            self.is_rl and (self.checkpoints.parent / "_critic" / UNFINISHED).exists()
        )

    def text(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@dataclass
class Started:
    """A running job, and all processes that it has had."""

    pid: int
    poll: Callable[[], int | None]
    """Returns the exit code; None while the job runs."""
    job: Job
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def wait(self, condition: Callable[[], bool] = lambda: False, limit: float = LIMIT) -> int | None:
        """Waits until `condition` holds or the job ends. Returns its exit code; None if it still runs."""
        deadline, looked = time.monotonic() + limit, 0.0
        while self.poll() is None and not condition():
            assert time.monotonic() < deadline, (
                f"{self.job.folder} does not go on:\n{self.job.text()[-3000:]}"
            )
            if time.monotonic() > looked + 0.5:
                self.look()
                looked = time.monotonic()
            time.sleep(0.001)
        return self.poll()

    def look(self) -> None:
        """Adds the processes of the job that run at this moment to its family."""
        with suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.pid)
            self.family |= {p.pid: p for p in (me, *me.children(recursive=True))}

    def kill(self) -> None:
        """Ends all processes of the job by SIGKILL at the same moment, so that none reacts to the end of
        another."""
        self.look()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.family.values():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        others = [process for pid, process in self.family.items() if pid != self.pid]
        psutil.wait_procs(others, timeout=20)  # it would take the exit code of the first process
        while self.poll() is None:
            time.sleep(0.01)


@dataclass(kw_only=True)
class Found:
    """Counts of disturbances, and the differences that disturbed and resumed jobs showed."""

    disturbed: int = 0
    inside: int = 0
    """Disturbances during a save."""
    compared: int = 0
    """Number of jobs that came to their end and were compared with the undisturbed one."""
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed job, and faults of checkpoints."""

    def __str__(self) -> str:
        wrong = f"; WRONG: {'; '.join(self.wrong[:5])}" if self.wrong else ""
        return f"{self.disturbed} ({self.inside} in a save), {self.compared} runs compared{wrong}"


Disturbance = Callable[[Job, random.Random, bool], tuple[Started, bool]]
"""A function (job, random numbers, in_save) -> (the job, which has ended; whether it was saving)."""


def disturbed(
    kind: str,
    task: TaskFiles,
    folder: Path,
    disturb: Disturbance,
    *,
    count: int,
    inside: int,
    steps: int = 40,
    more: str = "",
    seed: int = 0,
) -> Found:
    """Disturbs a job `count` times, `inside` of them in a save, and resumes it after each. Starts anew
    whenever the job comes to its end."""
    rng, found, attempts = random.Random(f"{kind}/{seed}"), Found(), 0
    whole, job = (
        Job(kind=kind, task=task, folder=folder / name, steps=steps, more=more)
        for name in ("whole", "disturbed")
    )
    whole.folder.mkdir(parents=True)
    assert whole.start().wait() == 0, whole.text()[-3000:]
    while found.disturbed < count:
        job.folder.mkdir(exist_ok=True)
        attempts += 1
        in_save = found.inside < inside and (attempts % 2 == 0 or count - found.disturbed <= inside)
        started, was_saving = disturb(job, rng, in_save)
        if started.poll() == 0:
            _compare(whole, job, found)
            shutil.rmtree(job.folder)
        else:
            found.disturbed += 1
            found.inside += was_saving
            _check_checkpoint(job, started.poll(), found)
    job.folder.mkdir(exist_ok=True)
    if (code := job.start().wait()) != 0:
        found.wrong.append(f"the last resume ended with {code}: {job.text()[-500:]}")
    else:
        _compare(whole, job, found)
    return found


def kill(job: Job, rng: random.Random, in_save: bool) -> tuple[Started, bool]:
    """Runs a job and ends all its processes by SIGKILL, with `in_save` during a save."""
    if in_save and not job.is_rl and rng.random() < 0.5:
        point = rng.choice(POINTS)
        started = job.start(f"{point}:kill@{rng.randint(1, 4) if point == 'save.file' else 1}")
        started.wait()
        return started, started.poll() != 0
    if not in_save and rng.random() < 0.2:  # before the first step
        started = job.start()
        time.sleep(rng.uniform(0, 20 if job.is_rl else 3))
    else:
        started = _at_random(job, rng, in_save)
        time.sleep(rng.uniform(0, 0.03) * in_save)
    if started.poll() is None:
        started.kill()
    return started, job.is_saving()


def stop(job: Job, rng: random.Random, in_save: bool) -> tuple[Started, bool]:
    """Runs a job and sends SIGTERM to its first process, with `in_save` during a save."""
    started = _at_random(job, rng, in_save)
    was_saving = job.is_saving()
    if started.poll() is None:
        os.kill(started.pid, signal.SIGTERM)
    started.wait()
    return started, was_saving


def _at_random(job: Job, rng: random.Random, in_save: bool) -> Started:
    """Starts a job, and returns it at a random moment of its next five steps."""
    rows, started = len(job.rows()) + rng.randint(1, 4), job.start()
    started.wait(lambda: len(job.rows()) >= rows)
    if in_save:
        started.wait(job.is_saving)
    else:
        time.sleep(rng.uniform(0, 0.1))
    return started


def _check_checkpoint(job: Job, code: int | None, found: Found) -> None:
    """Checks that a whole checkpoint of the last steps is there, and after a signal one of the last step. A
    job that saves every second step may lose the one that it is writing."""
    lost = 5 if "later" in job.kind else 3
    others = [str(job.checkpoints.parent / "_critic")] if job.is_rl else []
    others = [path for path in others if Path(path).exists()]
    tag, skipped = CheckpointFolder(str(job.checkpoints), CkptConfig(load_enable=True), others).find()
    step, rows = int((tag or "global_step0").removeprefix("global_step")), len(job.rows())
    is_whole = all(reason.startswith("the file latest ") for reason in skipped)
    is_right = step == rows and not job.is_saving() if code == EXIT_STOPPED else step >= rows - lost
    if not (is_whole and is_right and code in (EXIT_STOPPED, -signal.SIGKILL)):
        found.wrong.append(f"exit {code} at step {rows}: {tag}, {skipped}: {job.text()[-300:]}")


def _compare(whole: Job, job: Job, found: Found) -> None:
    """Compares samples, weights, and metrics except for times and memory. Of an asynchronous job, whose
    weight versions depend on timing, only the samples that were trained on are compared."""
    found.compared += 1
    if job.kind == "async ppo":
        one, other = (Counter(sample[:2] for sample in _samples(each)) for each in (whole, job))
        if one != other or max(other.values()) > 1:
            found.wrong.append(f"samples: {one - other} are missing, {other - one} are too many")
        return
    if (one := _metrics(whole)) != (other := _metrics(job)):
        steps = [i for i, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b]
        found.wrong.append(f"metrics: {len(other)} rows instead of {len(one)}, steps {steps[:5]} differ")
    if job.is_rl and _samples(whole) != _samples(job):
        found.wrong.append("samples differ")
    weights = [
        {f.name: f.read_bytes() for f in (j.folder / "out").glob("*.safetensors")} for j in (whole, job)
    ]
    if not weights[0] or weights[0] != weights[1]:
        found.wrong.append("weights differ")


def _metrics(job: Job) -> list[dict[str, float]]:
    measured = ("timing", "start", "memory", "throughput", "health")
    return [
        {name: value for name, value in json.loads(row).items() if not name.startswith(measured)}
        for row in job.rows()
    ]


def _samples(job: Job) -> list[tuple]:
    """Returns (group, index of the sample, its tokens) of each sample, in the order of the steps."""
    files = sorted((job.folder / "run" / "rollouts").glob("step_*.parquet"))
    return [(t.group, t.sample_index, tuple(t.token_ids)) for file in files for t in read_journal(file)]
