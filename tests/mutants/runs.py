"""Tries mutants in whole runs instead of tests, and reports which of them stop a run or make it warn.

    python -m mutants.run --runs [sft rl ppo lora async] [--reported] [--only ID ...]

A mutant is put into a copy of the package, which trains a tiny model: supervised, by synchronous RL, by PPO
with a critic and penalties, by RL with adapters, and by asynchronous RL. The first of these runs that stops,
or prints a warning that it does not print with the unchanged package, catches the mutant. Mutants whose
lines no run executes are not counted. Neither are those that leave all numbers of the runs as they are,
because no check of a run can see them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import MappingProxyType

from mutants.catalogue import ROOT, Mutant, changed_lines, mutated

from openrlhf.config.commands import PPO, SFT
from openrlhf.tasks.prepare import TaskFiles, prepare

LIMIT = 300.0
"""Maximum seconds of a run. A longer run counts as stopped."""
SIZES = {"num_pretrain": 200, "num_sft": 200, "num_prompts": 64, "num_eval": 16}
"""Numbers of rows in the files of word problems."""
CODE = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\]$", re.MULTILINE)
"""Pattern of the code at the end of an error's first line."""
TOLD = re.compile("runs one sequence at a time")
"""Pattern of the warning about a model whose packed rows are not right."""
SFT_FLAGS = (
    "--data.output_key output --data.apply_chat_template --data.max_len 256 --data.max_samples 80 "
    "--train.batch_size 8 --train.micro_batch_size 2 --train.max_epochs 2 --adam.lr 1e-3"
)
RL_FLAGS = (
    "--data.apply_chat_template --data.label_key label --data.max_len 96 --rollout.max_new_tokens 12 "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.temperature 0.9 "
    "--train.batch_size 16 --train.micro_batch_size 4 --train.max_epochs 2 --train.max_steps 3 "
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 "
    "--actor.num_gpus_per_node 1 --train.colocate_all --rollout.engine transformers"
)
COMMON = "--ds.param_dtype fp32 --train.backend torch"
RUNS = {
    "sft": SFT_FLAGS,
    "rl": RL_FLAGS,
    "ppo": (
        f"{RL_FLAGS} --algo.advantage.estimator gae --algo.advantage.gamma 0.95 --algo.advantage.lambd 0.9 "
        "--critic.num_gpus_per_node 1 --critic.adam.lr 1e-3 --algo.kl.target 0.05 --algo.kl.horizon 100 "
        "--actor.eps_clip_low_high 0.1 0.3 --actor.dual_clip 3 --actor.entropy_coef 0.01 "
        "--reward.overlong_buffer_len 4 --reward.stop_properly_penalty_coef 0.5 --reward.clip_range -0.6 0.6"
    ),
    "lora": f"{RL_FLAGS} --ds.lora.rank 4 --ds.lora.alpha 8",
    "async": f"{RL_FLAGS} --train.async_enable --algo.advantage.is_correction_enable",
}
WEIGHTS = "weights"
"""Name of the digest of a run's final weights."""
RECORDER = """
import os
import sys
import threading

file = os.environ.get("EXECUTED_LINES")
seen, package = set(), os.path.dirname(os.path.abspath(__file__)) + "/"


def call(frame, event, argument):
    return line if frame.f_code.co_filename.startswith(package + "openrlhf/") else None


def line(frame, event, argument):
    place = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and place not in seen:
        seen.add(place)
        with open(file, "a") as log:
            log.write(f"{place[0].removeprefix(package)}:{place[1]}\\n")
    return line


if file:
    sys.settrace(call)
    threading.settrace(call)
"""
"""The file sitecustomize.py, with which each process of a run writes the lines of the package that it
executes."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a mutant in the runs."""

    mutant: Mutant
    outcome: str
    """`stopped`, `warned`, `crashed` (an error without a code), `SURVIVED`, `no effect` on the numbers of
    runs, or `not executed` by any run."""
    by: str = ""
    """The run, and the code of its error or the metric of its warning."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a run."""

    stopped: str
    """Code of the error; `crash` for an error without a code, "" for a run without an error."""
    warnings: frozenset[str]
    """Metrics that the run warned about, and other warnings that it printed."""
    numbers: frozenset[tuple[str, str]]
    """Names and values of the metrics of all steps and of the digest of the final weights."""


@dataclass(frozen=True, kw_only=True)
class Usual:
    """A run of the unchanged package."""

    warnings: frozenset[str]
    lines: frozenset[str]
    """Lines that it executes, `path:number`."""
    numbers: frozenset[tuple[str, str]]
    """Numbers that two runs have in common, so times are not among them."""

    def equals(self, ended: Ended) -> bool:
        """Returns True if a run has the weights of this one, and its other numbers."""
        return any(name == WEIGHTS for name, _ in self.numbers) and self.numbers <= ended.numbers


class Trial:
    """A copy of the package, and the files of its runs."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """`names`: the runs to try."""
        self.folder, self.names = folder, names
        self.usual: Mapping[str, Usual] = {}
        folder.mkdir()
        shutil.copytree(ROOT / "openrlhf", folder / "openrlhf", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "sitecustomize.py").write_text(RECORDER)
        shutil.copy2(ROOT / "tests" / "e2e" / "digits_reward.py", folder / "reward.py")
        self.files: TaskFiles = prepare(folder / "task", seed=0, **SIZES)

    def run_unchanged(self, name: str) -> Usual:
        """Runs the unchanged package twice. Raises RuntimeError if it stops."""
        lines = self.folder / f"{name}.lines"
        runs = [self.run(name, {"EXECUTED_LINES": str(lines)}), self.run(name)]
        for ended in runs:
            if ended.stopped:
                log = (self.folder / f"{name}.log").read_text()[-3000:]
                raise RuntimeError(f"{name} of the unchanged package stopped with {ended.stopped}:\n{log}")
        return Usual(
            warnings=runs[0].warnings | runs[1].warnings,
            lines=frozenset(lines.read_text().splitlines()),
            numbers=runs[0].numbers & runs[1].numbers,
        )

    def executes(self, name: str, mutant: Mutant) -> bool:
        """Returns True if a run executes a line that the mutant changes."""
        executed = self.usual[name].lines
        return any(f"{mutant.path}:{line}" in executed for line in changed_lines(mutant, self.folder))

    def verdict(self, mutant: Mutant) -> Verdict:
        names = [name for name in self.names if self.executes(name, mutant)]
        file, start = self.folder / mutant.path, time.monotonic()
        original, survived = file.read_text(), "no effect" if names else "not executed"
        file.write_text(mutated(mutant, self.folder))
        try:
            for name in names:
                ended, usual = self.run(name), self.usual[name]
                outcome = "crashed" if ended.stopped == "crash" else "stopped" if ended.stopped else "warned"
                if by := ended.stopped or ", ".join(sorted(ended.warnings - usual.warnings)):
                    seconds = time.monotonic() - start
                    return Verdict(mutant=mutant, outcome=outcome, by=f"{name}: {by}", seconds=seconds)
                if not usual.equals(ended):
                    survived = "SURVIVED"
        finally:
            file.write_text(original)
        return Verdict(mutant=mutant, outcome=survived, seconds=time.monotonic() - start)

    def run(self, name: str, variables: Mapping[str, str] = MappingProxyType({})) -> Ended:
        """Runs a command with the copy of the package. `variables`: additional environment variables."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        environment = os.environ | variables | {"PYTHONPATH": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "OPENRLHF_CACHE": str(out / "cache")}
        with open(f"{out}.log", "w") as log:
            try:
                code = subprocess.run(
                    self.command(name, out), cwd=self.folder, env=environment, stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, timeout=LIMIT,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 1
        printed = Path(log.name).read_text(errors="replace")
        codes = CODE.findall(printed)
        health = out / "run" / "health.jsonl"
        texts = (
            [json.loads(line)["text"] for line in health.read_text().splitlines()] if health.exists() else []
        )
        return Ended(
            stopped=(codes[-1] if codes else "crash") if code else "",
            warnings=frozenset([*(text.split()[0] for text in texts), *TOLD.findall(printed)]),
            numbers=_numbers(out),
        )

    def command(self, name: str, out: Path) -> list[str]:
        files, places = self.files, f"--logger.run_dir {out / 'run'} --ckpt.output_dir {out / 'model'}"
        if name == "sft":
            command = SFT
            inputs = f"--model.model_name_or_path {files.model} --data.dataset {files.sft} "
            inputs += f"--eval.dataset {files.sft} --eval.max_samples 16"
        else:
            command = PPO
            inputs = f"--actor.model_name_or_path {files.model} --data.prompt_dataset {files.prompts} "
            inputs += f"--reward.remote_url {self.folder / 'reward.py'} --eval.dataset {files.eval} "
            inputs += "--eval.steps 2 --eval.n_samples_per_prompt 1 --eval.temperature 0"
        flags = shlex.split(f"{inputs} {places} {RUNS[name]} {COMMON}")
        return [sys.executable, "-m", "openrlhf.cli.main", command.name, *flags]


def _numbers(out: Path) -> frozenset[tuple[str, str]]:
    """Returns the numbers of a run's folder and model; see `Ended.numbers`."""
    file = out / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {
        (f"{i} {name}", repr(value)) for i, record in enumerate(records) for name, value in record.items()
    }
    weights = sorted((out / "model").glob("*.safetensors"))
    if weights:
        found.add((WEIGHTS, sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()))
    return frozenset(found)


def try_in_runs(mutants: Sequence[Mutant], names: Sequence[str], jobs: int) -> list[Verdict]:
    """Tries the mutants in the runs with these names, `jobs` at a time, and prints each verdict."""
    printing = Lock()
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        free: SimpleQueue[Trial] = SimpleQueue()
        trials = [Trial(Path(folder) / str(i), names) for i in range(jobs)]
        for trial in trials:
            free.put(trial)

        def unchanged(name: str) -> Usual:
            trial = free.get()
            try:
                return trial.run_unchanged(name)
            finally:
                free.put(trial)

        def verdict(mutant: Mutant) -> Verdict:
            trial = free.get()
            try:
                found = trial.verdict(mutant)
            finally:
                free.put(trial)
            with printing:
                print(f"{found.outcome:12} {found.seconds:6.0f} s  {mutant.id}  {found.by}", flush=True)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            usual = dict(zip(names, pool.map(unchanged, names), strict=True))
            for trial in trials:
                trial.usual = usual
            return list(pool.map(verdict, mutants))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Formats a table of the numbers of mutants by class and outcome."""
    tried = [verdict for verdict in verdicts if verdict.outcome not in ("not executed", "no effect")]
    lines = [
        "",
        "| class | tried | have an effect | stopped or warned | crashed | survived |",
        "|---|---|---|---|---|---|",
    ]
    groups = sorted({verdict.mutant.group for verdict in verdicts})
    for name in [*groups, "all"]:
        is_in = lambda verdict, name=name: name in ("all", verdict.mutant.group)
        outcomes = [verdict.outcome for verdict in tried if is_in(verdict)]
        named = outcomes.count("stopped") + outcomes.count("warned")
        counts = sum(map(is_in, verdicts)), len(outcomes), named
        more = outcomes.count("crashed"), outcomes.count("SURVIVED")
        lines.append(f"| {name} | {' | '.join(map(str, (*counts, *more)))} |")
    return "\n".join(lines)
