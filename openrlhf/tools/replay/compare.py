"""Finds the first difference between two recorded runs: compares settings, then each step in causal order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.api import ResumeChange as Change
from openrlhf.api import num_samples, read_table
from openrlhf.api import resume_change as find_change
from openrlhf.tools.command_line.run_files import TRAINING
from openrlhf.tools.replay.differences import NUMBER, ORDER, Compared, compare_metrics, compare_rollouts, same
from openrlhf.tools.replay.recorded import RecordedRun
from openrlhf.tools.replay.tensors import compare_checkpoints

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

CAUSES = {
    ORDER: "the runs train on different prompts, or in a different order: compare the flags data.*, "
    "--train.seed, --rollout.batch_size and the dataset",
    NUMBER: "the runs train on different numbers of samples: compare the flags rollout.* and filtering",
    **dict.fromkeys(
        ("prompt", "label", "label_is_json", "source", "images"),
        "the dataset, the template or the flags of columns differ",
    ),
    "seed": "the seeds of sampling differ; they are derived from --train.seed, epoch, prompt and sample",
    "weight_versions": "the tokens were sampled with different weight versions, which in asynchronous "
    "training depend on the speed of engines and trainer",
    "token_ids": "the log-probs before this token are equal, but another token was sampled: seeds, sampling "
    "parameters or the agent differ, or after feedback the environment",
    "rollout_log_probs": "the engine computes different log-probs for equal tokens: its weights, version, "
    "kernels or batches differ",
    "action_ranges": "the agent marks different tokens as actions",
    **dict.fromkeys(
        ("finish_reason", "truncated", "turn_starts", "outcome", "error"), "the agent or its limits differ"
    ),
    **dict.fromkeys(
        ("score", "reward", "turn_rewards", "extra_logs", "extra_texts"),
        "the reward source returns different values for equal samples",
    ),
    "log_probs": "the policy computes different log-probs of equal samples: its weights (from the update of "
    "the step before), its kernels or its rows differ",
    "ref_log_probs": "the reference computes different log-probs of equal samples: its weights or kernels "
    "differ",
    "values": "the critic computes different values of equal samples: its weights (from the update of the "
    "step before) or its kernels differ",
    **dict.fromkeys(
        ("advantages", "returns"),
        "equal rewards and log-probs give different advantages: estimator, KL coefficient or penalties "
        "differ",
    ),
    "optimizer_steps": "the runs train on equal samples in a different order: compare --train.batch_size and "
    "--train.shuffle",
    "ranks": "the runs train on equal samples on different ranks: the number of ranks or the packing differs",
}
"""Quantity -> meaning of its difference if all quantities before it are equal."""
METRIC = (
    "all records before the update are equal: the loss, the gradient or the optimizer differs, or the order "
    "of supervised data, which is not recorded"
)
FIRST_METRIC = (
    "all records before the first update are equal: the first weights, the loss or the gradient differs, or "
    "the order of supervised data (--train.seed), which is not recorded"
)
EVALUATED = "all records before are equal: the evaluation's data, seeds (--train.seed) or scores differ"
TENSOR = "all records before the checkpoint are equal: the optimizer differs in ways that no metric shows"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One record of a step that two runs share."""

    step: int
    name: str
    """The record: (filtered) rollouts, metrics, evaluation, metrics of it, or checkpoint of a model."""
    found: Sequence[Compared]

    @property
    def differing(self) -> list[Compared]:
        return [compared for compared in self.found if not compared.is_equal]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Differences between the flags, data and machines of two runs: name -> values of both."""

    learned: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Flags, data and models that determine what the run learns."""
    other: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Flags of placement, memory, kernels, logging and saving. Some of them change the last bits."""
    environment: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Versions, machine, environment variables and commits."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The result of comparing two runs."""

    settings: Settings
    equal: Sequence[Stage]
    """The stages before the first difference."""
    first: Stage | None
    """The first stage that differs; None if all are equal."""
    later: Stage | None
    """The first common checkpoint at or after `first`; None if there is none or `first` is a checkpoint."""
    alone: dict[str, list[int]]
    """Description of record and run -> steps that only this run recorded."""

    @property
    def are_equal(self) -> bool:
        return self.first is None and not self.alone


def bisect(a: RecordedRun, b: RecordedRun) -> Bisection:
    """Compares two runs of the same command up to the first difference."""
    equal: list[Stage] = []
    first = later = None
    for stage in stages(a, b):
        if stage.differing:
            first = stage
            break
        equal.append(stage)
    if first is not None and not first.name.startswith("checkpoint"):
        saved = _common(a.checkpoints(), b.checkpoints()).items()
        later = next(
            (s for step, models in saved if step >= first.step for s in _checkpoints(step, models)), None
        )
    return Bisection(settings=settings(a, b), equal=equal, first=first, later=later, alone=_alone(a, b))


def settings(a: RecordedRun, b: RecordedRun) -> Settings:
    flags = _changed(a.flags, b.flags)
    types = [command.config_type for command in TRAINING if a.command in ("", command.name)]
    decides = lambda key: all(find_change(type_, key).change is not Change.FREE for type_ in types)
    data = _changed(a.contents, b.contents)
    return Settings(
        learned={f"--{key}": values for key, values in flags.items() if decides(key)} | data,
        other={f"--{key}": values for key, values in flags.items() if not decides(key)},
        environment=_changed(a.environment, b.environment),
    )


def _changed(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys([*a, *b])
    return {key: (a.get(key), b.get(key)) for key in keys if not same(a.get(key), b.get(key))}


def stages(a: RecordedRun, b: RecordedRun, *, reads: bool = False) -> Iterator[Stage]:
    """Yields the comparison of each record that both runs have, in causal order. `reads`: True to read
    checkpoints even if their recorded hashes are equal."""
    checkpoints = _common(a.checkpoints(), b.checkpoints())
    journals = {name: _common(a.rollouts(name), b.rollouts(name)) for name in ("filtered", "step", "eval")}
    metrics = _common(a.measured, b.measured)
    for step in sorted({*checkpoints, *metrics, *(s for steps in journals.values() for s in steps)}):
        for name in ("filtered", "step"):
            if step in journals[name]:
                yield _rollouts(step, name, journals[name][step])
        found = [*compare_metrics(*metrics[step])] if step in metrics else []
        evaluated = [compared for compared in found if compared.quantity.startswith("eval/")]
        if own := [compared for compared in found if compared not in evaluated]:
            yield Stage(step=step, name="metrics", found=own)
        if step in checkpoints:
            yield from _checkpoints(step, checkpoints[step], reads=reads)
        if step in journals["eval"]:
            yield _rollouts(step, "eval", journals["eval"][step])
        if evaluated:
            yield Stage(step=step, name="metrics of the evaluation", found=evaluated)


def _rollouts(step: int, name: str, journals: tuple[Path, Path]) -> Stage:
    tables = [read_table(journal) for journal in journals]
    kept = any(len(table) != num_samples(table) for table in tables)
    title = {"step": "rollouts", "filtered": "filtered rollouts", "eval": "evaluation"}[name]
    return Stage(step=step, name=title, found=[*compare_rollouts(*tables, kept=kept)])


def _checkpoints(
    step: int, models: tuple[Mapping[str, Path], Mapping[str, Path]], *, reads: bool = False
) -> Iterator[Stage]:
    for model, folders in _common(*models).items():
        found = [*compare_checkpoints(*folders, reads=reads)]
        yield Stage(step=step, name=f"checkpoint of the {model}", found=found)


def _common(a: Mapping[KeyT, ValueT], b: Mapping[KeyT, ValueT]) -> dict[KeyT, tuple[ValueT, ValueT]]:
    """Returns key -> values of both mappings, for their common keys."""
    return {key: (value, b[key]) for key, value in a.items() if key in b}


def _alone(a: RecordedRun, b: RecordedRun) -> dict[str, list[int]]:
    """Returns the steps whose metrics or rollouts only one run has."""
    found = {}
    for name in ("metrics", "step"):
        own, others = (set(run.measured if name == "metrics" else run.rollouts()) for run in (a, b))
        title = "metrics" if name == "metrics" else "rollouts"
        for run, steps in (("first", own - others), ("second", others - own)):
            if steps:
                found[f"{title} of the {run} run"] = sorted(steps)
    return found


def describe_cause(stage: Stage) -> str:
    quantity = stage.differing[0].quantity
    if stage.name.startswith("checkpoint"):
        return TENSOR
    if stage.name == "metrics of the evaluation":
        return EVALUATED
    if stage.name == "metrics":
        return METRIC if stage.step > 1 else FIRST_METRIC
    return CAUSES.get(quantity, "")
