"""The longest row that the flags allow, and whether its memory suffices."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.memory.training import RankMemory


def most_tokens(train: Any, longest: int, sharing: int) -> int:
    """Returns the maximum number of tokens in a row under the flags `train.*`. `longest`: tokens of the
    longest item; `sharing`: sequence-parallel size."""
    if train.dynamic_batch_enable:
        row = max(longest, train.max_tokens_per_gpu * sharing)
        return min(row, longest * train.batch_size)
    return longest * train.micro_batch_size


def memory_of_rows(
    estimate: Callable[[int], RankMemory], train: Any, longest: int, sharing: int, room: int
) -> str:
    """Describes a rank's memory for the longest row, see `most_tokens`. Raises UsageError, with the largest
    value of the flag that fits, if it is more than `room` bytes. `estimate`: tokens of a row -> memory."""
    tokens = most_tokens(train, longest, sharing)
    needed = estimate(tokens)
    text = f"{needed} for a row of up to {tokens:,} tokens"
    if needed.total <= room:
        return text
    name = "max_tokens_per_gpu" if train.dynamic_batch_enable else "micro_batch_size"
    value, step = getattr(train, name), sharing if train.dynamic_batch_enable else longest
    exceeds = lambda number: estimate(max(longest, number * step)).total > room
    fitting = bisect_left(range(value), True, lo=1, key=exceeds) - 1
    remedy = f"Use --train.{name} {fitting}."
    if not fitting:
        remedy = f"Even a row of {longest:,} tokens does not fit; `openrlhf plan` names flags that help."
    text = f"a rank needs an estimated {text}, and has {room / 2**30:.1f} GB.\n{remedy}"
    raise UsageError(ErrorCode.RESOURCES, text, flag=f"--train.{name}", value=value)
