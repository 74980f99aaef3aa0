"""The losses of supervised commands, on the log-probs or the score of each answer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.api import DPOObjective, KTOObjective


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
