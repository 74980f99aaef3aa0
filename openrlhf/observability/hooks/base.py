"""The events of a training loop, and the base class of objects that listen to them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from openrlhf.algorithms.kl import KLController
from openrlhf.errors import CodedError, ErrorCode, RunError
from openrlhf.registry import Selectable
from openrlhf.types import Batch, Metrics, Schedule, Trajectory, Updated
from openrlhf.user_file import line_and_error

CodedErrorT = TypeVar("CodedErrorT", bound=CodedError)


@dataclass(kw_only=True, eq=False)
class Step:
    """A step of RL. The loop fills in its fields as it goes; each event says which are new."""

    number: int
    """1 for the first step of a run; 0 for what a run does before it."""
    version: int
    """Version of the weights that the step trains."""
    samples: Sequence[Trajectory] = ()
    """The samples of the step, those that failed included."""
    collected: list[Trajectory] = field(default_factory=list)
    """All samples that arrived for the step: also filtered ones, and those that a later step trains on."""
    filtered: list[Trajectory] = field(default_factory=list)
    """Samples that dynamic filtering rejected."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the step so far. A hook may add some of its own."""
    kl: KLController = field(default_factory=lambda: KLController(coef=0.0))
    """The KL coefficient of the step, and how it adapts."""
    batch: Batch | None = None
    """The tokens of the finished samples, in their order, and what is known of each action: (A,) columns."""
    groups: Sequence[tuple[int, int]] | None = None
    """(epoch, prompt number) of each sequence of the batch, if the order keeps them together."""
    trained_on: Sequence[int] = ()
    """Indices of the sequences of the batch that are trained on."""
    schedules: dict[str, Schedule] = field(default_factory=dict)
    """Name of a model that learns -> the sequences of each of its optimizer steps."""
    updated: Updated | None = None
    """Result of the policy's update (of the critic's, while it learns alone), with the metrics of all
    models."""
    optimizer_steps: int = 0
    """Number of the policy's optimizer steps before this step."""
    assign_advantages: Callable[[Batch, Sequence[Trajectory]], tuple[Batch, Metrics]] | None = None
    """Computes advantages and their metrics of a batch and its samples, as the step does."""

    @property
    def finished(self) -> list[Trajectory]:
        """The samples that did not fail."""
        return [t for t in self.samples if t.ok]

    @property
    def num_samples(self) -> int:
        """Number of episodes. An episode with several sequences counts once."""
        return sum(t.is_first for t in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation: the samples of all evaluation prompts, and the metrics `eval/...` of their scores."""

    step: int
    """Number of steps that are done."""
    version: int
    """Version of the weights that sampled."""
    samples: Sequence[Trajectory]
    metrics: Metrics


class Hook(Selectable):
    """Listens to the events of a run: override the methods of those that matter, the others do nothing.

    Methods are called in the process of the loop (supervised training: on every rank). A loop of one's own
    calls them in the threads of its verbs, of which two may work at the same time. An exception ends the run.
    """

    # A step of RL

    def sampled(self, step: Step) -> None:
        """The samples have been collected."""

    def scoring(self, step: Step) -> None:
        """Policy, reference, teacher and critic have begun to read the samples, beside which this is called.
        The run's record adds the metrics of the samples; in a loop of one's own `log` does."""

    def scored(self, step: Step) -> None:
        """`batch` has the log-probs of policy, reference and teacher and the values of the critic, `metrics`
        those of the samples, in a loop of one's own after `log`."""

    def advantages(self, step: Step) -> None:
        """`batch` has advantages and returns, `metrics` theirs and those of rewards."""

    def scheduled(self, step: Step) -> None:
        """`schedules` and `trained_on` are known, and nothing has been trained yet."""

    def updated(self, step: Step) -> None:
        """The models have been trained. If the update computed the policy's log-probs, `batch` has them."""

    def trained(self, step: Step) -> None:
        """The step is done with its samples. It is called after an error, too, with what was known then, and
        for samples that were all filtered."""

    def synced(self, step: Step) -> None:
        """The engines have the new weights, those after version `version`."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation of RL is complete."""

    def ended(self, step: Step) -> None:
        """The step of RL is over, and `metrics` are written."""

    # A step of supervised training

    def before_step(self, step: int, rows: Sequence[Any], objective: Any) -> None:
        """The rank is about to train on these packed rows with this loss; `step` is 1 for the first one."""

    def after_step(self, step: int, metrics: Metrics) -> None:
        """The optimizer step has been taken, on all ranks; also on a rank of the policy or the critic."""

    # An update on a rank of the policy or the critic, for hooks that packages attach to ranks

    def before_update(self, batch: Batch, mini_batches: Sequence[Sequence[int]], kl_coef: float) -> None:
        """The rank is about to take an optimizer step on each of `mini_batches`, which list sequences of
        `batch`. Only hooks that packages attach to ranks are called, in a loop of one's own for batches of
        the current weights alone."""

    def first_pass(self, before: np.ndarray, now: np.ndarray, step: int) -> None:
        """The first optimizer step of an update, number `step`, has computed the log-probs `now` (A,) of its
        actions. The batch had `before` (A,), of the same weights. Called as `before_update` is."""

    # The record of a run, for hooks that packages attach to the observer

    def logged(self, step: int, metrics: Metrics) -> None:
        """A step's metrics are complete: also those of its evaluations, and its times. Only hooks that
        packages attach to the observer are called."""

    def closing(self) -> None:
        """The run ends, also after an error: what is not written yet must be. Called as `logged` is."""

    def closed(self) -> None:
        """All files of the run folder are complete, and nothing else is on the screen. Called as `logged`
        is."""

    # All runs

    def saving(self, tag: str) -> None:
        """A checkpoint is about to be completed: what belongs to it must be on the disk."""

    def saved(self, tag: str) -> None:
        """A checkpoint is complete on this rank. With `ckpt.async_save` that is some steps later."""


def announce(hooks: Iterable[Hook], event: Callable[..., None], *about: Any) -> None:
    """Calls the method `event` of each hook, as in `announce(hooks, Hook.sampled, step)`. Raises RunError,
    which names file and line, for an error of a user's hook."""
    for hook in hooks:
        try:
            getattr(hook, event.__name__)(*about)
        except Exception as error:
            if type(hook).__module__.startswith("openrlhf."):
                raise
            raise failed(type(hook), event.__name__, error, RunError) from error


@contextmanager
def announcing_end(hooks: Sequence[Hook], event: Callable[..., None], *about: Any) -> Iterator[None]:
    """Announces `event` after the block, even if the block fails: its own error is then raised."""
    try:
        yield
    except BaseException as error:
        for hook in hooks:
            try:
                announce([hook], event, *about)
            except Exception as second:
                error.add_note(f"and then: {second}")
        raise
    announce(hooks, event, *about)


def failed(hook: type[Hook], method: str, error: Exception, kind: type[CodedErrorT]) -> CodedErrorT:
    """Returns an error that names the place in a user's hook at which `error` was raised."""
    file = inspect.getsourcefile(hook) or hook.__module__
    text = f"{line_and_error(error, file)}\nThe hook {hook.__name__} raised it in {method}()."
    return kind(ErrorCode.USER_CODE, text, flag="--train.hooks", value=file)
