"""Runs the stages of a rehearsal in order, and records the outcome and evidence of each. Meshes and batches
of the full size are simulated, without processes."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.api import (
    CLASSIFIER_HEAD,
    Command,
    Mesh,
    Metrics,
    PPOConfig,
    describe,
    flag_values,
    lay_out,
    to_yaml,
    training_schedule,
)
from openrlhf.api import MISMATCH_PROBE as PROBE
from openrlhf.tools.plan.estimate import Assumed, RunPlan, plan_run
from openrlhf.tools.plan.hardware import Cluster, cores
from openrlhf.tools.plan.rehearsal import settings
from openrlhf.tools.plan.rehearsal.runs import (
    Result,
    RunFailedError,
    check_equal,
    reloaded,
    run_command,
    weight_difference,
)
from openrlhf.tools.plan.rehearsal.settings import rows_for
from openrlhf.tools.plan.rehearsal.shrinking import shrunk_model

OK, FAILED, LEFT_OUT = "ok", "failed", "not rehearsed"

BETWEEN_RANKS = {"relative": 1e-3, "absolute": 1e-4, "at_limits": 0.05}
"""Maximum difference of a metric between one rank and two, which add float32 numbers in different orders."""
AFTER_RESUME = {"relative": 1e-6, "absolute": 1e-7}
"""Maximum difference of a metric, and of a weight, between a resumed and an uninterrupted run."""

MODEL = "model_name_or_path"
"""Last part of the flags that name models."""
SECONDS, RL_SECONDS = 20.0, 60.0
"""Usual seconds of a supervised and of an RL run on two idle cores."""


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
    ran: Result | None = None
    """The first rehearsed run, if it succeeded."""

    @property
    def failed(self) -> bool:
        return any(stage.outcome == FAILED for stage in self.stages)

    @property
    def is_rl(self) -> bool:
        return isinstance(self.config, PPOConfig)

    @property
    def mesh(self) -> Mesh:
        ranks = self.config.actor.num_gpus if self.is_rl else self.cluster.devices
        return settings.choose_mesh(self.config, ranks)

    def run(self) -> None:
        """Runs all stages. A failure ends only the stages that need its result."""
        self._perform("plan and layout of the full size", self._planned)
        self._perform("models and data, shrunk", self.prepare)
        self._perform("run", self._run)
        if self.is_rl:
            self._perform("weight sync", lambda: [_synchronised(self._whole.metrics)])
        self._perform("evaluation", self._evaluated)
        self._perform("export", self._exported)
        self._perform("losses of one rank", self._one_rank)
        self._perform("checkpoint and resume", self._resumed)

    def _perform(self, name: str, stage: Callable[[], Iterable[str]]) -> None:
        """Runs a stage, which yields its evidence, and keeps its outcome."""
        self.tell(name, 0.0, 0.0)
        started, outcome = time.monotonic(), OK
        try:
            evidence = [*stage()]
        except LeftOutError as reason:
            outcome, evidence = LEFT_OUT, [str(reason)]
        except (ValueError, OSError, AssertionError, RuntimeError) as error:
            outcome, evidence = FAILED, [describe(error) or type(error).__name__]
        seconds = time.monotonic() - started
        self.stages.append(Stage(name=name, outcome=outcome, seconds=seconds, evidence="; ".join(evidence)))

    # ---- stages

    def _planned(self) -> Iterator[str]:
        self.plan = plan_run(self.command, self.config, self.cluster, self.assumed)
        yield from simulate(self.config, self.plan)
        if not self.plan.fits:
            yield f"the plan does not fit on {self.cluster}, see below"

    def prepare(self) -> Iterator[str]:
        """Shrinks models, chooses rows and derives the flags of the runs. Yields the models' sizes."""
        small = settings.rehearsed(self.config, self.mesh, self.folder, dict(self._shrink()))
        self.small = settings.with_values(small, rows_for(small, self.folder / "data"))
        self.small_plan = plan_run(self.command, self.small, cores(self.mesh.size), Assumed())
        sizes = self.small_plan.sizes
        yield from (f"{role}: {size.parameters:,} parameters" for role, size in sizes.items())

    def _run(self) -> Iterator[str]:
        if self.small is None:
            raise LeftOutError("models or data could not be shrunk")
        result = self._start("run", self.small, self.mesh)
        metrics = result.metrics
        if sorted(step for step in metrics if step) != [*range(1, settings.STEPS + 1)]:
            raise RunFailedError(f"it logged the steps {sorted(metrics)} instead of 1 to {settings.STEPS}")
        self.ran = result
        engines = f", {self.small.num_engines} engine(s)" if self.is_rl else ""
        yield f"{describe_mesh(self.mesh)}{engines}, {settings.STEPS} steps; {_losses(metrics)}"

    def _evaluated(self) -> Iterator[str]:
        if not self.config.eval.dataset:
            raise LeftOutError("the run has no --eval.dataset")
        metrics = self._whole.metrics[settings.SAVED]
        found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if not found:
            raise RunFailedError(f"step {settings.SAVED} has no metrics of the evaluation")
        name = next((name for name in found if name.endswith(("score_mean", "loss"))), next(iter(found)))
        yield f"{name} {found[name]:.6g}"

    def _exported(self) -> Iterator[str]:
        model, trained = self._whole.model, self.small.actor if self.is_rl else self.small.model
        yield reloaded(model, Path(trained.model_name_or_path), head=self._head)

    def _one_rank(self) -> Iterator[str]:
        expected = self._whole.metrics
        if self.mesh.size == 1:
            raise LeftOutError("the run has one rank")
        lora, model = self.config.ds.lora, getattr(self.config, "model", None)
        if (lora.dropout > 0 and lora.rank > 0) or (model and model.dropout_enable):
            raise LeftOutError("dropout draws different random numbers on different ranks")
        one = Mesh()
        found = self._start("one_rank", settings.on_mesh(self.small, one), one, saves=False).metrics
        last = 1 if self._is_asynchronous else settings.STEPS  # later samples depend on the processes' speed
        for step in range(1, last + 1):
            between = f"one rank and {describe_mesh(self.mesh)} in step {step}"
            check_equal(found[step], expected[step], between, **BETWEEN_RANKS)
        yield f"equal in {'step 1' if last == 1 else f'steps 1 to {last}'} up to rounding; {_losses(found)}"

    def _resumed(self) -> Iterator[str]:
        whole = self._whole
        found = self._start("resumed", self.small, self.mesh, resumes=True, saves=False)
        last, metrics = settings.STEPS, found.metrics
        if sorted(metrics) != [last]:
            raise RunFailedError(
                f"resumed after step {settings.SAVED}, it logged the steps {sorted(metrics)}"
            )
        if self._is_asynchronous:
            yield (
                f"the run continues with step {last}, which is not compared: with --train.async_enable its "
                "samples may differ"
            )
            return
        between = f"the resumed and the uninterrupted run in step {last}"
        check_equal(metrics[last], whole.metrics[last], between, **AFTER_RESUME)
        largest = weight_difference(whole.model, found.model)
        if largest > AFTER_RESUME["absolute"]:
            raise RunFailedError(f"weights of the resumed run differ by up to {largest:.3g}")
        equal = "equal to the last bit" if largest == 0 else f"equal up to {largest:.1g}"
        yield f"after step {settings.SAVED}; step {last} and the final weights are {equal}"

    # ---- helpers

    @property
    def _whole(self) -> Result:
        if self.ran is None:
            raise LeftOutError("the run failed")
        return self.ran

    @property
    def _is_asynchronous(self) -> bool:
        return self.is_rl and self.config.train.async_enable

    @property
    def _head(self) -> str:
        return getattr(self.config.ds, "value_head_prefix", CLASSIFIER_HEAD)

    def _shrink(self) -> Iterator[tuple[str, str]]:
        """Shrinks each model once, and yields (flag, shrunk model)."""
        made: dict[str, str] = {}
        scorers = self.config.reward.models if self.is_rl else ()
        for key, value in flag_values(self.config).items():
            if not key.endswith(MODEL) or not value:
                continue
            paths = scorers if key.startswith("reward.") else (value,)
            for path in paths:
                if path not in made:
                    folder, options = self.folder / "models" / str(len(made)), {"scores": path in scorers}
                    small = shrunk_model(path, f"--{key}", folder, seed=len(made), head=self._head, **options)
                    made[path] = str(small)
            yield key, ",".join(made[path] for path in paths)

    def _start(
        self, name: str, config: Any, mesh: Mesh, *, resumes: bool = False, saves: bool = True
    ) -> Result:
        config = settings.in_folders(config, self.folder, name, resumes=resumes, saves=saves)
        flags = self.folder / name / "flags.yaml"
        flags.parent.mkdir(parents=True, exist_ok=True)
        flags.write_text(to_yaml(config, defaults=False), encoding="utf-8")
        ranks, expected = (1, RL_SECONDS) if self.is_rl else (mesh.size, SECONDS)
        tick = lambda seconds: self.tell(name.replace("_", " "), seconds, expected)
        return run_command(self.command.name, flags, self.folder / name, ranks=ranks, tick=tick)


def _losses(metrics: dict[int, Metrics]) -> str:
    """Lists the losses and gradient norms of the steps. With equal rewards the policy loss is 0, and only the
    entropy bonus has a gradient."""
    rows = [row for step, row in sorted(metrics.items()) if step]
    loss = "policy/loss" if "policy/loss" in rows[0] else next((n for n in rows[0] if n.endswith("loss")), "")
    names = [name for name in (loss, "grad_norm") if name in rows[0]]
    values = {name: ", ".join(f"{row[name]:.6g}" for row in rows if name in row) for name in names}
    return "; ".join(f"{name} {listed}" for name, listed in values.items())


def _synchronised(metrics: dict[int, Metrics]) -> str:
    """Describes the largest differences of engines and trainer. Too large ones would have ended the run."""
    rows = [row for step, row in metrics.items() if step]
    parts = []
    for name in (PROBE, "mismatch/abs_diff_max"):
        if values := [row[name] for row in rows if name in row]:
            parts.append(f"{name} at most {max(values):.2g}")
    if not parts:
        raise LeftOutError("the run compared no log-probs of engines and trainer")
    return f"log-probs of engines and trainer after each sync: {', '.join(parts)}"


def simulate(config: Any, plan: RunPlan) -> Iterator[str]:
    """Yields descriptions of the meshes, and of the tokens that the ranks get in the first optimizer step, if
    samples have random lengths from 1 to twice the plan's mean."""
    mean, rng = plan.lengths.total, random.Random(0)
    draw = lambda count: [rng.randint(1, 2 * mean) for _ in range(count)]
    if isinstance(config, PPOConfig):
        meshes = {role: place.mesh for role, place in config.placements.items()}
        lengths = draw(config.samples_per_step)
        dealt = _deal_rl(config, lengths)
    else:
        ds = config.ds
        mesh = Mesh.within(plan.cluster.devices, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
        meshes, lengths = {"model": mesh}, draw(config.train.batch_size)
        dealt = _deal(config, lengths, mesh)
    yield from (f"{role}: {describe_mesh(mesh)}" for role, mesh in meshes.items())
    samples, tokens = sum(map(len, dealt)), [sum(lengths[i] for i in mine) for mine in dealt]
    yield (
        f"{samples} samples on {len(dealt)} data-parallel ranks: {min(tokens):,} to {max(tokens):,} tokens"
    )


def describe_mesh(mesh: Mesh) -> str:
    """Returns the number of ranks and the sizes above 1, such as `8 ranks (4 data x 2 tensor parallel)`."""
    sizes = zip(mesh.shape, mesh.DIMENSIONS, strict=True)
    split = " x ".join(f"{size} {name}" for size, name in sizes if size > 1)
    return f"{mesh.size} rank{'s' * (mesh.size > 1)}" + (f" ({split} parallel)" if split else "")


def _deal(config: Any, lengths: Sequence[int], mesh: Mesh) -> list[list[int]]:
    task: Any = SimpleNamespace(config=config, row_type=SimpleNamespace(of=list))
    dataset: Any = SimpleNamespace(lengths=lengths)
    place: Any = SimpleNamespace(data=mesh.data, sequence=mesh.sequence, data_rank=0)
    steps = lay_out(task, dataset, batch_size=len(lengths), shuffle=False, mesh=place)
    return [[i for row in rows for i in row] for rows in steps.shard(range(len(lengths)))]


def _deal_rl(config: PPOConfig, lengths: Sequence[int]) -> list[list[int]]:
    groups = [i // config.rollout.n_samples_per_prompt for i in range(len(lengths))]
    return training_schedule(
        lengths,
        range(len(lengths)),
        num_batches=max(1, config.updates_per_step // config.train.max_epochs),
        epochs=1,
        num_ranks=config.data_parallel_size,
        seed=(config.train.seed,),
        groups=groups if config.train.shuffle == "group" else None,
    )[0]
