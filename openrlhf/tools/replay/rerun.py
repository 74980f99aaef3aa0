"""Computes steps of a recorded run again, in separate folders. Its processes run cli/replayed.py."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from openrlhf.api import LATEST_FILE as LATEST
from openrlhf.api import PPO, ErrorCode, RunError, UsageError, num_samples, read_table
from openrlhf.tools.command_line.jobs import run_job
from openrlhf.tools.command_line.run_files import ALONE
from openrlhf.tools.replay.compare import Stage, stages
from openrlhf.tools.replay.recorded import RecordedRun

THREADS = ("OMP_", "MKL_")
"""Prefixes of variables that set the number of threads, on which the last bits of a CPU's sums depend."""
STDERR = 2
"""File descriptor of stderr, to which the output of processes goes."""
OWN_SETTINGS: Mapping[str, Any] = {
    **ALONE,
    "ckpt.overwrite": True,
    "ckpt.save_hf": False,
    "ckpt.async_save": False,
    "ckpt.max_num": 1000,
    "ckpt.max_mem": float("inf"),
    "train.verify_steps": 0,
}
"""Values of flags of saving, logging and checks with which steps are computed again."""
PLACES: Mapping[str, str] = {
    "ckpt.output_dir": "out",
    "ckpt.path": "checkpoints",
    "logger.run_dir": "run",
}
"""Flag of a folder that is written -> name of that folder inside a rerun's folder."""
OF_ENGINES = (
    *("eval/", "mismatch/probe", "rollout/num_prompts", "rollout/engine", "rollout/kept_ratio"),
    *("rollout/filtered_", "rollout/sampled_score_mean", "rollout/buffered_groups"),
)
"""Prefixes of metrics of sampling, weight syncs and evaluations, which a replay does not compute."""
WITHOUT_ENGINES: Mapping[str, Any] = {"eval.dataset": None, "eval.steps": -1, "train.max_restarts": 0}
"""Further values of flags for reinforcement learning."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A part of a recorded run that is computed again."""

    run: RecordedRun
    step: int
    """The last step to compute."""
    folder: Path
    """An empty folder for all files that are written."""
    code: Path | None = None
    """Folder of the package `openrlhf` that computes the steps; None: the installed one."""
    saves: bool = False
    """True to save a checkpoint of `step` even if the run saved none."""

    @cached_property
    def start(self) -> int:
        """The step of the newest checkpoint before `step`; 0 without one."""
        return max((step for step in self.run.checkpoints() if step < self.step), default=0)

    @property
    def beginning(self) -> str:
        return f"the checkpoint of step {self.start}" if self.start else "the beginning"

    @property
    def is_rl(self) -> bool:
        return self.run.command == PPO.name

    @property
    def result(self) -> RecordedRun:
        return RecordedRun(self.folder / "run")

    def check(self) -> None:
        """Raises UsageError if the run did not record the step, or an RL run lacks samples of the steps since
        the checkpoint."""
        if not self.run.command:
            text = "argv.txt is missing or names no training command, so the step cannot be computed again"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=self.run.path)
        steps = self.run.steps
        if self.step not in steps:
            known = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
            what = "rollouts" if self.is_rl else "metrics"
            text = (
                f"the run has {what} of {known}; give one of them (--logger.logging_steps, --logger.rollouts)"
            )
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--step", value=self.step)
        if self.is_rl:
            self._check_rollouts()

    def _check_rollouts(self) -> None:
        flags = self.run.flags
        truncates = flags["rollout.top_p"] < 1 or flags["rollout.top_k"] > 0
        truncates = truncates and flags["rollout.max_kept_tokens"] > 0
        if flags["algo.router_replay"]:
            text = "the run trained with the engine's routing of experts, which rollouts do not record"
            raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--algo.router_replay")
        journals = self.run.rollouts()
        for step in range(self.start + 1, self.step + 1):
            if step not in journals:
                text = f"step {step} has no rollouts, and there is no checkpoint after it to start from"
                raise UsageError(ErrorCode.NOT_FOUND, text, flag="--step", value=self.step)
            table = read_table(journals[step])
            if len(table) != num_samples(table):
                text = (
                    f"has {len(table)} of {num_samples(table)} samples; a replay needs --logger.rollouts full"
                )
                raise UsageError(ErrorCode.NOT_FOUND, text, value=journals[step])
            if "images" in table.column_names and any(map(len, table["images"].to_pylist())):
                text = "has samples with images, whose content is not recorded"
                raise UsageError(ErrorCode.UNSUPPORTED, text, value=journals[step])
            if truncates and "kept_ids" not in table.column_names:
                text = "an older release wrote it, without the nucleus of --rollout.top_p and --rollout.top_k"
                raise UsageError(ErrorCode.UNSUPPORTED, text, value=journals[step])

    @property
    def settings(self) -> dict[str, Any]:
        saves = self.saves or self.step in self.run.checkpoints()
        checkpoints = {"ckpt.load_enable": self.start > 0, "ckpt.save_steps": self.step if saves else -1}
        places = {key: str(self.folder / name) for key, name in PLACES.items()}
        return {**OWN_SETTINGS, **places, **checkpoints, **(WITHOUT_ENGINES if self.is_rl else {})}

    def compute(self) -> None:
        """Computes the steps after the checkpoint. Prints the output of the processes on stderr. Raises
        RunError if they fail."""
        self.folder.mkdir(exist_ok=True)
        self._link_checkpoint()
        file = configured(self.run, self.settings, self.folder / "replay.yaml")
        words = ["openrlhf.cli.replayed", self.run.command, str(file), str(self.run.path.resolve())]
        words += [str(self.start), str(self.step)]
        code = run_job(
            words,
            STDERR,
            ranks=self.run.num_ranks,
            environment=build_environment(self.run, self.code),
            folder=self.run.working_directory,
        )
        if code:
            text = (
                f"a process that computes the step again ended with exit status {code}; see its output above"
            )
            raise RunError(ErrorCode.WORKER_FAILED, text, flag="--step", value=self.step)

    def _link_checkpoint(self) -> None:
        for model, target in self.run.checkpoints().get(self.start, {}).items():
            place = self.folder / "checkpoints" / ("" if model == "model" else f"_{model}")
            place.mkdir(parents=True, exist_ok=True)
            (place / target.name).symlink_to(target.resolve())
            (place / LATEST).write_text(target.name, encoding="utf-8")


def configured(run: RecordedRun, settings: Mapping[str, Any], file: Path) -> Path:
    """Writes the configuration of a run to `file`, with `settings` for those flags that it has."""
    tree = run.read_config()
    for key in settings.keys() & run.flags.keys():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = settings[key]
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return file


def build_environment(run: RecordedRun, code: Path | None = None) -> dict[str, str]:
    """Returns the environment variables of this process, with the run's numbers of threads. For an RL run
    without them it is one thread, Ray's default for each process. `code`: folder from which modules are
    imported first."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(THREADS)}
    own |= {"OMP_NUM_THREADS": "1"} if run.command == PPO.name else {}
    recorded = {name.removeprefix("variables."): v for name, v in run.environment.items()}
    own |= {name: str(value) for name, value in recorded.items() if name.startswith(THREADS)}
    if code is not None:  # `python -m` imports from it before its working directory
        others = [path for path in (os.environ.get("PYTHONPATH"), str(run.working_directory)) if path]
        own |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(code), *others])}
    return own


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The comparison of the steps that were computed again with the recorded ones."""

    stages: Sequence[Stage]
    not_compared: Sequence[str]
    """Descriptions of records that were not compared, with the reasons."""

    @property
    def is_equal(self) -> bool:
        return bool(self.stages) and not any(stage.differing for stage in self.stages)


def compare(rerun: Rerun) -> Replayed:
    recorded, computed = rerun.run, rerun.result
    found: list[Stage] = []
    left_out: list[str] = []
    for stage in stages(recorded, computed, reads=True):
        if stage.step <= rerun.start:  # the checkpoint from which the steps were computed
            continue
        if stage.name.startswith("metrics") and rerun.is_rl:
            of_engines = [c for c in stage.found if c.quantity.startswith(OF_ENGINES)]
            left_out += [c.quantity for c in of_engines if not c.is_equal]
            stage = replace(stage, found=[c for c in stage.found if c not in of_engines])
        if stage.name.startswith("metrics") and recorded.flags.get("train.hooks"):
            known = computed.measured.get(stage.step, {})
            stage = replace(stage, found=[c for c in stage.found if c.quantity in known])
        found += [stage] if stage.found else []
    reasons = ["metrics of hooks (--train.hooks)"] if recorded.flags.get("train.hooks") else []
    if names := list(dict.fromkeys(left_out)):
        reasons.append(f"metrics of sampling, syncs and evaluations: {', '.join(names)}")
    if rerun.is_rl:
        reasons.append("sampling and rewards: the recorded samples are used")
    if rerun.step not in recorded.checkpoints():
        reasons.append(f"weights after step {rerun.step}: the run has no checkpoint of this step")
    if alone := sorted(set(range(rerun.start + 1, rerun.step + 1)) - recorded.measured.keys()):
        reasons.append(f"metrics of steps {', '.join(map(str, alone))}: the run did not log them")
    return Replayed(stages=found, not_compared=reasons)
