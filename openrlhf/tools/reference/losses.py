"""The losses of supervised commands, on the log-probs or the score of each answer, and learning rates."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.api import DPOObjective, KTOObjective, OptimConfig


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


def plain_sft(log_probs: Sequence[Tensor], num_actions: float) -> Tensor:
    """Returns the negative sum of the log-probs of all actions over `num_actions`. `log_probs`: (A,) of each
    sequence."""
    return -torch.cat(list(log_probs)).sum() / num_actions


def plain_dpo(
    objective: DPOObjective, log_probs: Sequence[Tensor], reference: Sequence[Tensor], num_pairs: float
) -> Tensor:
    """Returns the sum of the pairs' losses over `num_pairs`.

    `log_probs`: (A,) of each answer, chosen and rejected ones alternating. `reference`: summed log-probs ()
    of each answer under the reference.
    """
    beta, smoothing = objective.beta, objective.label_smoothing
    total = torch.zeros((), dtype=torch.float64)
    for i in range(0, len(log_probs), 2):
        chosen, rejected = log_probs[i], log_probs[i + 1]
        h = (chosen.sum() - reference[i]) - (rejected.sum() - reference[i + 1])
        if objective.ipo:
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            loss = -(1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h)
        total = total + loss - objective.nll_coef * chosen.sum() / max(len(chosen), 1)
    return total / num_pairs


def plain_rm(scores: Sequence[Tensor], margins: Tensor, num_pairs: float) -> Tensor:
    """Returns the sum of the pairs' losses over `num_pairs`. `scores`: () of each answer, chosen and rejected
    ones alternating. `margins`: (P,)."""
    total = torch.zeros((), dtype=torch.float64)
    for i, margin in enumerate(margins.tolist()):
        total = total - F.logsigmoid(scores[2 * i] - scores[2 * i + 1] - margin)
    return total / num_pairs


def plain_kto(
    objective: KTOObjective,
    log_probs: Sequence[Tensor],
    reference: Sequence[Tensor],
    desirable: Sequence[bool],
    num_answers: float,
) -> Tensor:
    """Returns the sum of the answers' losses over `num_answers`.

    `log_probs`: (A,) of each answer. `reference`: summed log-probs () of each answer under the reference.
    """
    total = torch.zeros((), dtype=torch.float64)
    for answer, of_reference, is_desirable in zip(log_probs, reference, desirable, strict=True):
        gain = objective.beta * (answer.sum() - of_reference - objective.kl)
        weight = objective.desirable_weight if is_desirable else objective.undesirable_weight
        total = total + weight * (1 - (gain if is_desirable else -gain).sigmoid())
    return total / num_answers
