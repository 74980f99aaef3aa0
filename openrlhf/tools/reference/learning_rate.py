"""The learning rates of the usual schedules."""

import math

from openrlhf.api import OptimConfig


def plain_learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float | None:
    """Returns the learning rate of an optimizer step, from 0, of `total_steps`: i / w of the peak in step i
    (from 1) of w warm-up steps, then a decay that would end one step after the last. None for Muon, and for
    schedules other than constant, linear and cosine ones."""
    name, warmup = optim.lr_scheduler, max(1, math.ceil(optim.lr_warmup_ratio * total_steps))
    floors = {"linear": 0.0, "cosine": 0.0, "cosine_with_min_lr": optim.min_lr_ratio}
    if optim.optim != "adam" or not (name in floors or name.startswith("constant")):
        return None
    if step < warmup and name != "constant":
        share = (step + 1) / warmup
    elif name in floors:
        left = 1 - (step + 1 - warmup) / (total_steps + 1 - warmup)
        left = left if name == "linear" else (1 - math.cos(math.pi * left)) / 2
        share = floors[name] + (1 - floors[name]) * left
    else:
        share = 1.0
    return optim.adam.lr * share
