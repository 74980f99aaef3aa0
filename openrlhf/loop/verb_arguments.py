"""Checks what a user's loop passes to the verbs, and what the user's losses return."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.config.fields import convert, find_flag, to_words
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop.lanes import wait_for_value
from openrlhf.registry import Registry
from openrlhf.types import Batch, Metrics, PromptGroup, not_none
from openrlhf.user_file import call_problem

ItemT = TypeVar("ItemT")


def check_function(function: Any, role: str, *takes: str) -> None:
    """Raises UsageError if `function` cannot be called with arguments of the names `takes`. `role`: what the
    function is for."""
    name = getattr(function, "__name__", type(function).__name__ if callable(function) else role)
    if problem := call_problem(function, name, *takes):
        text = f"{problem}.\nA {role} is a function ({', '.join(takes)}), called with all samples at once."
        raise UsageError(ErrorCode.USER_CODE, text)


def whole(name: str, value: Any) -> int:
    """Returns a number of at least 1. Raises UsageError for any other value of the argument `name`."""
    if (number := operator.index(value) if hasattr(value, "__index__") else 0) < 1:
        raise UsageError(
            ErrorCode.INVALID_VALUE, "must be a whole number of at least 1", flag=name, value=value
        )
    return number


def flag_value(key: str, value: Any) -> Any:
    """Returns a value of a flag. Raises UsageError for one that the flag does not take."""
    try:
        return convert(to_words(value), not_none(find_flag(PPOConfig, key)).type)
    except ValueError as error:
        raise UsageError(ErrorCode.INVALID_VALUE, str(error), flag=f"--{key}", value=value) from error


def list_of(kinds: type[ItemT] | tuple[type[ItemT], ...], items: Any, expected: str) -> list[ItemT]:
    """Returns the items as a list. Raises UsageError, which says what was `expected`, if they are no list of
    `kinds`."""
    is_list = isinstance(items, Iterable) and not isinstance(items, str | Mapping | Batch)
    found = list(items) if is_list else [items]
    wrong = [item for item in found if not isinstance(item, kinds)]
    if wrong or not is_list:
        of = f"a list with {_kind(wrong[0])}" if is_list else _kind(items)
        raise UsageError(ErrorCode.INVALID_VALUE, f"expects a list of {expected}; this is {of}")
    return found


def groups_of(items: Any) -> list[PromptGroup]:
    """Returns a list of groups. If two have samples of one prompt with the same numbers, by which samples are
    told apart, those of the later group get others. Raises UsageError for anything else."""
    groups = list_of(PromptGroup, items, "groups, as `sample` and `reward` return; join two with one + other")
    taken: dict[tuple[int, int], set[int]] = {}
    for place, group in enumerate(groups):
        known = taken.setdefault((group.prompt.epoch, group.prompt.prompt_id), set())
        numbers = {t.sample_index for t in group.trajectories}
        if known & numbers:
            shift = max(known) + 1
            moved = [replace(t, sample_index=t.sample_index + shift) for t in group.trajectories]
            groups[place], numbers = replace(group, trajectories=moved), {i + shift for i in numbers}
        known |= numbers
    return groups


def as_batch(item: Any) -> Batch:
    """Returns a batch. Raises UsageError for anything else."""
    if not isinstance(item, Batch):
        raise UsageError(ErrorCode.INVALID_VALUE, f"expects what `batch` returns; this is {_kind(item)}")
    return item


def check_choice(registry: Registry, chosen: Any, kind: str) -> None:
    """Raises UsageError unless `chosen` is the name of a class of the registry, or such a class."""
    if isinstance(chosen, str):
        unknown = f"no {kind} has this name; there are {', '.join(registry.names)}"
        registry.choose(chosen, flag=kind, unknown=unknown)
    elif not (inspect.isclass(chosen) and issubclass(chosen, registry.base)):
        text = f"expects a name or a class derived from {registry.base.__name__}; this is {chosen!r}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=kind)


def as_advantages(values: Any, count: int) -> np.ndarray:
    """Returns numbers as advantages (count,) of actions. Raises UsageError for another shape, and for values
    that are not finite."""
    given = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    problem = ""
    if given.dtype.kind not in "fiub":
        problem = f"expects a name, a class or numbers; this is {_kind(values)}"
    elif given.shape not in {(), (count,)}:
        problem = f"the batch has {count} actions, and advantages the shape {given.shape}; np.repeat("
        problem += "numbers, batch.num_actions) gives each action that of its sequence"
    elif not np.isfinite(given).all():
        problem = "some are not finite"
    if problem:
        raise UsageError(ErrorCode.INVALID_VALUE, problem, flag="advantages")
    return np.full(count, given, np.float32)


def read_metrics(values: Any) -> Metrics:
    """Returns metrics as numbers: those of tensors with one element, and of results. Raises UsageError for
    others, and for the name of a run's own number."""
    if not isinstance(values, Mapping):
        text = f"expects a dict of names and numbers; this is {_kind(values)}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="metrics")
    if "step" in values:
        text = "the run counts its steps itself, and logs the number by this name; leave it out"
        raise UsageError(ErrorCode.CONFLICT, text, flag="metric step")
    return {str(name): _number(name, wait_for_value(value)) for name, value in values.items()}


def _number(name: Any, value: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            return float(value.detach() if isinstance(value, Tensor) else value)
    raise UsageError(ErrorCode.INVALID_VALUE, f"is no number, but {_kind(value)}", flag=f"metric {name}")


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of the shape {tuple(shape)}" if shape is not None else "")


def compute_loss(loss: Callable, log_probs: Tensor, batch: Batch) -> tuple[np.ndarray, Metrics]:
    """Calls a loss function. Returns the gradient (A,) of its value with respect to the log-probs, and the
    metrics with the loss. Raises UsageError for a value that is no loss."""
    try:
        answer = loss(log_probs, batch)
    except (TypeError, RuntimeError) as error:
        if "numpy" not in str(error):
            raise
        text = f"the loss function failed: {error}\nThe fields of a batch are numpy arrays; in a loss, write "
        raise UsageError(ErrorCode.USER_CODE, f"{text}torch.from_numpy(batch.advantages).") from error
    value, more = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not (isinstance(value, Tensor) and value.numel() == 1):
        text = f"returns a tensor with one number, or (loss, metrics); this one returned {_kind(value)}"
        raise UsageError(ErrorCode.USER_CODE, f"a loss function {text}")
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), log_probs, allow_unused=True)
    if gradient is None:
        text = "the loss does not depend on log_probs: detach, item, numpy and no_grad cut gradients off"
        raise UsageError(ErrorCode.USER_CODE, text)
    return gradient.numpy(), {"policy/loss": float(value.detach())} | read_metrics(more or {})
