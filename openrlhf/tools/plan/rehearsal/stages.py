"""Runs the stages of a rehearsal in order, and records the outcome and evidence of each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.api import CLASSIFIER_HEAD, Command, Metrics, PPOConfig, describe, flag_values, to_yaml
from openrlhf.api import MISMATCH_PROBE as PROBE
from openrlhf.tools.plan.estimate import Assumed, RunPlan, plan_run
from openrlhf.tools.plan.hardware import Cluster, cores
from openrlhf.tools.plan.rehearsal import settings
from openrlhf.tools.plan.rehearsal.export import reloaded
from openrlhf.tools.plan.rehearsal.full_size import simulate
from openrlhf.tools.plan.rehearsal.rows import rows_for
from openrlhf.tools.plan.rehearsal.runs import (
    Result,
    RunFailedError,
    differences,
    run_command,
    weight_difference,
)
from openrlhf.tools.plan.rehearsal.shrinking import shrunk_model

OK, FAILED, LEFT_OUT = "ok", "failed", "not rehearsed"

BETWEEN_RANKS = {"relative": 1e-3, "absolute": 1e-4, "at_limits": 0.05}
"""Maximum difference of a metric between one rank and two, which add float32 numbers in different orders."""
AFTER_RESUME = {"relative": 1e-6, "absolute": 1e-7}
"""Maximum difference of a metric, and of a weight, between a resumed and an uninterrupted run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The outcome of a stage."""

    name: str
    outcome: str
    """OK, FAILED or LEFT_OUT."""
    seconds: float
    evidence: str
    """Observations; for a failure its message; for a stage that was left out the reason."""


class LeftOutError(Exception):
    """Raised in a stage that cannot be rehearsed. The text is the reason."""


@dataclass(kw_only=True)
class Rehearsal:
    """A rehearsal of one run, and the outcomes of its stages so far."""

    command: Command
    config: Any
    cluster: Cluster
    """Hardware of the real run."""
    assumed: Assumed
    folder: Path
    """Folder for all files of the rehearsal."""
    tell: Callable[[str, float, float], None] = lambda name, seconds, expected: None
    """Function that is called during a stage with its name, its seconds so far, and its usual seconds."""
    stages: list[Stage] = field(default_factory=list)
    plan: RunPlan | None = None
    small: Any = None
    """Configuration of the rehearsed runs, without folders."""
    small_plan: RunPlan | None = None

    @property
    def failed(self) -> bool:
        return any(stage.outcome == FAILED for stage in self.stages)

    @property
    def is_rl(self) -> bool:
        return isinstance(self.config, PPOConfig)

    @property
    def scale(self) -> settings.Scale:
        """Numbers of processes of the rehearsed run, derived from the ranks of the real one."""
        ranks = self.config.actor.num_gpus if self.is_rl else self.cluster.devices
        return settings.choose_scale(self.config, ranks)

    def run(self) -> None:
        """Runs all stages. A failure ends only the stages that need its result."""
        with self._stage("plan and layout of the full size") as said:
            self.plan = plan_run(self.command, self.config, self.cluster, self.assumed)
            said.extend(simulate(self.config, self.plan))
            if not self.plan.fits:
                said.append(f"the plan does not fit on {self.cluster}, see below")
        with self._stage("models and data, shrunk") as said:
            self.prepare(said)
        whole = self._run_stage("run", self._layout_run)
        if self.is_rl:
            with self._stage("weight sync") as said:
                said.append(_synchronised(_needed(whole).metrics))
        with self._stage("evaluation") as said:
            said.append(self._evaluated(whole))
        with self._stage("export") as said:
            model, trained = _needed(whole).model, self.small.actor if self.is_rl else self.small.model
            said.append(reloaded(model, Path(trained.model_name_or_path), head=self._head))
        self._run_stage("losses of one rank", lambda said: self._one_rank(said, whole))
        self._run_stage("checkpoint and resume", lambda said: self._resumed(said, whole))

    # ---- stages

    def prepare(self, said: list[str]) -> None:
        """Shrinks models, chooses rows and derives the flags of the runs. Appends the models' sizes to
        `said`."""
        models = dict(self._shrink())
        small = settings.rehearsed(self.config, self.scale, self.folder, models)
        changes = rows_for(small, self.folder / "data")
        self.small = settings.with_values(small, changes)
        self.small_plan = plan_run(self.command, self.small, cores(self.scale.ranks), Assumed())
        sizes = self.small_plan.sizes
        said.extend(f"{role}: {size.parameters:,} parameters" for role, size in sizes.items())

    def _layout_run(self, said: list[str]) -> Result:
        result = self._start("run", _ready(self.small), self.scale.ranks)
        metrics = result.metrics
        if sorted(step for step in metrics if step) != [*range(1, settings.STEPS + 1)]:
            raise RunFailedError(f"it logged the steps {sorted(metrics)} instead of 1 to {settings.STEPS}")
        engines = f", {self.small.num_engines} engine(s)" if self.is_rl else ""
        said.append(f"{self.scale}{engines}, {settings.STEPS} steps; {_losses(metrics)}")
        return result

    def _evaluated(self, whole: Result | None) -> str:
        if not self.config.eval.dataset:
            raise LeftOutError("the run has no --eval.dataset")
        metrics = _needed(whole).metrics[settings.SAVED]
        found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if not found:
            raise RunFailedError(f"step {settings.SAVED} has no metrics of the evaluation")
        name = next((name for name in found if name.endswith(("score_mean", "loss"))), next(iter(found)))
        return f"{name} {found[name]:.6g}"

    def _one_rank(self, said: list[str], whole: Result | None) -> None:
        expected = _needed(whole).metrics
        if self.scale.ranks == 1:
            raise LeftOutError("the run has one rank")
        if _draws_dropout(self.config):
            raise LeftOutError("dropout draws different random numbers on different ranks")
        models = {key: value for key, value in flag_values(self.small).items() if key.endswith(MODEL)}
        config = settings.rehearsed(self.config, settings.ONE_RANK, self.folder, models)
        kept = ("data.", "train.batch_size", "train.micro_batch_size", "rollout.", "eval.")
        config = settings.with_values(
            config, {key: value for key, value in flag_values(self.small).items() if key.startswith(kept)}
        )
        found = self._start("one_rank", config, 1, saves=False).metrics
        steps = self._comparable
        for step in steps:
            _refuse_differences(
                found[step], expected[step], f"one rank and {self.scale} in step {step}", **BETWEEN_RANKS
            )
        said.append(f"equal in {_steps(steps)} up to rounding; {_losses(found)}")

    def _resumed(self, said: list[str], whole: Result | None) -> None:
        result = _needed(whole)
        found = self._start("resumed", _ready(self.small), self.scale.ranks, resumes=True, saves=False)
        last, metrics = settings.STEPS, found.metrics
        if sorted(metrics) != [last]:
            raise RunFailedError(
                f"resumed after step {settings.SAVED}, it logged the steps {sorted(metrics)}"
            )
        if self._is_asynchronous:
            said.append(
                f"the run continues with step {last}, which is not compared: with --train.async_enable its "
                "samples may differ"
            )
            return
        _refuse_differences(
            metrics[last],
            result.metrics[last],
            f"the resumed and the uninterrupted run in step {last}",
            **AFTER_RESUME,
        )
        largest = weight_difference(result.model, found.model)
        if largest > AFTER_RESUME["absolute"]:
            raise RunFailedError(f"weights of the resumed run differ by up to {largest:.3g}")
        equal = "equal to the last bit" if largest == 0 else f"equal up to {largest:.1g}"
        said.append(f"after step {settings.SAVED}; step {last} and the final weights are {equal}")

    # ---- helpers

    @property
    def _comparable(self) -> list[int]:
        """Steps whose samples do not depend on the speed of processes."""
        return [1] if self._is_asynchronous else [*range(1, settings.STEPS + 1)]

    @property
    def _is_asynchronous(self) -> bool:
        return self.is_rl and self.config.train.async_enable

    @property
    def _head(self) -> str:
        """Name of the scalar head of reward models."""
        return getattr(self.config.ds, "value_head_prefix", CLASSIFIER_HEAD)

    def _shrink(self) -> Iterator[tuple[str, str | None]]:
        """Shrinks each model once, and yields (flag, shrunk model)."""
        made: dict[str, str] = {}
        config, scorers = self.config, self.config.reward.models if self.is_rl else ()
        for key, value in flag_values(config).items():
            if not key.endswith(MODEL):
                continue
            used = scorers if key.startswith("reward.") else filter(None, [value])
            for path in used:
                if path not in made:
                    folder = self.folder / "models" / str(len(made))
                    small = shrunk_model(
                        path, f"--{key}", folder, seed=len(made), scores=path in scorers, head=self._head
                    )
                    made[path] = str(small)
            if key.startswith("reward."):
                yield key, ",".join(made[path] for path in scorers) or None
            elif value:
                yield key, made[value]

    def _start(
        self, name: str, config: Any, ranks: int, *, resumes: bool = False, saves: bool = True
    ) -> Result:
        config = settings.in_folders(config, self.folder, name, resumes=resumes, saves=saves)
        flags = self.folder / name / "flags.yaml"
        flags.parent.mkdir(parents=True, exist_ok=True)
        flags.write_text(to_yaml(config, defaults=False), encoding="utf-8")
        processes = 1 if self.is_rl else ranks
        expected = RL_SECONDS if self.is_rl else SECONDS
        tick = lambda seconds: self.tell(name.replace("_", " "), seconds, expected)
        return run_command(self.command.name, flags, self.folder / name, ranks=processes, tick=tick)

    def _run_stage(self, name: str, work: Callable[[list[str]], Result | None]) -> Result | None:
        """Runs a stage and returns its result; None after a failure."""
        with self._stage(name) as said:
            return work(said)
        return None

    @contextmanager
    def _stage(self, name: str) -> Iterator[list[str]]:
        """Measures a stage and keeps its outcome. Yields the list to which the block appends its evidence."""
        said, started = list[str](), time.monotonic()
        self.tell(name, 0.0, 0.0)
        outcome = OK
        try:
            yield said
        except LeftOutError as reason:
            outcome, said = LEFT_OUT, [str(reason)]
        except (ValueError, OSError, AssertionError, RuntimeError) as error:
            outcome, said = FAILED, [describe(error) or type(error).__name__]
        seconds = time.monotonic() - started
        self.stages.append(Stage(name=name, outcome=outcome, seconds=seconds, evidence="; ".join(said)))


MODEL = "model_name_or_path"
"""Last part of the flags that name models."""
SECONDS, RL_SECONDS = 20.0, 60.0
"""Usual seconds of a supervised and of an RL run on two idle cores."""


def _ready(config: Any) -> Any:
    if config is None:
        raise LeftOutError("models or data could not be shrunk")
    return config


def _needed(whole: Result | None) -> Result:
    if whole is None:
        raise LeftOutError("the run failed")
    return whole


def _draws_dropout(config: Any) -> bool:
    model = getattr(config, "model", None)
    return (config.ds.lora.dropout > 0 and config.ds.lora.rank > 0) or bool(model and model.dropout_enable)


def _losses(metrics: dict[int, Metrics]) -> str:
    """Lists the losses and gradient norms of the steps. With equal rewards the policy loss is 0, and only the
    entropy bonus has a gradient."""
    rows = [row for step, row in sorted(metrics.items()) if step]
    loss = "policy/loss" if "policy/loss" in rows[0] else next((n for n in rows[0] if n.endswith("loss")), "")
    names = [name for name in (loss, "grad_norm") if name in rows[0]]
    values = {name: ", ".join(f"{row[name]:.6g}" for row in rows if name in row) for name in names}
    return "; ".join(f"{name} {listed}" for name, listed in values.items())


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _refuse_differences(one: Metrics, other: Metrics, between: str, **limits: float) -> None:
    if found := differences(one, other, **limits):
        listed = "\n".join(f"{name}: {values}" for name, values in [*found.items()][:8])
        raise RunFailedError(f"{between} differ:\n{listed}")


def _synchronised(metrics: dict[int, Metrics]) -> str:
    """Describes the largest differences between engines and trainer. If they were too large, the run itself
    would have failed."""
    rows = [row for step, row in metrics.items() if step]
    parts = []
    for name in (PROBE, "mismatch/abs_diff_max"):
        if values := [row[name] for row in rows if name in row]:
            parts.append(f"{name} at most {max(values):.2g}")
    if not parts:
        raise LeftOutError("the run compared no log-probs of engines and trainer")
    return f"log-probs of engines and trainer after each sync: {', '.join(parts)}"
