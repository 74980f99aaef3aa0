"""The learning rate schedule of a run."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.config.sections import OptimConfig


def lr_schedule(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Returns a function that maps an optimizer step, from 0, to its learning rate as a fraction of the peak.
    `total_steps`: optimizer steps of the whole run.

    Step k of a warm-up of w >= 1 steps has the fraction (k + 1) / w, so the last warm-up step, and without a
    warm-up the first step, has the peak. The schedules are those of transformers. Their step 0 has a learning
    rate of 0, so a run starts at their step 1, and the minimum would be reached one step after the end. Steps
    beyond `total_steps`, as a loop may take, keep the rate of the last one: a cosine would rise again.
    """
    if optim.lr_scheduler == "constant":
        return lambda step: 1.0
    warmup = max(1, math.ceil(optim.lr_warmup_ratio * total_steps))
    ahead = 0 if optim.lr_scheduler == "cosine_warmup_with_min_lr" else 1  # starts with 1 / w itself
    scheduler = transformers.get_scheduler(  # loaded when it is used: it imports peft and bitsandbytes
        optim.lr_scheduler,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=total_steps + ahead,
        scheduler_specific_kwargs=_options(optim, total_steps),
    )
    (shape,) = cast(LambdaLR, scheduler).lr_lambdas
    return lambda step: shape(min(step, total_steps - 1) + ahead)


def _options(optim: OptimConfig, total_steps: int) -> dict[str, Any] | None:
    """Returns the arguments that this schedule needs besides the numbers of steps."""
    if optim.lr_scheduler.endswith("_with_min_lr"):
        return {"min_lr_rate": optim.min_lr_ratio}
    if optim.lr_scheduler == "warmup_stable_decay":
        return {"num_decay_steps": math.ceil(optim.lr_decay_ratio * total_steps)}
    if optim.lr_scheduler == "inverse_sqrt" and optim.lr_warmup_ratio == 0:
        return {"timescale": 10_000}  # the default is the length of the warm-up
    return None
