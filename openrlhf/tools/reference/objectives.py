"""The losses of supervised commands on the log-probs or the score of each answer, learning rates, and the
losses of objectives on items of a dataset, as functions of the outputs of each sequence alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.api import (
    Batch,
    DPOObjective,
    ExperienceRow,
    KTOObjective,
    LossNorm,
    OptimConfig,
    Pair,
    PolicyObjective,
    PPOConfig,
    RewardObjective,
    Sample,
    SFTObjective,
    TokenScores,
    UnpairedExample,
    not_none,
)
from openrlhf.tools.reference.policy import is_covered, plain_policy_loss


def plain_learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float | None:
    """Returns the learning rate of an optimizer step, from 0, of `total_steps`: i / w of the peak in step i
    (from 1) of w warm-up steps, then a decay that would end one step after the last, whose rate later steps
    keep. None for Muon, and for schedules other than constant, linear and cosine ones."""
    step = min(step, total_steps - 1)
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


Reference = Callable[[Sample], Tensor]
"""Function from a sequence to the log-probs (A,) of its actions under a reference model."""


class PlainLoss(NamedTuple):
    """A loss of sequences whose outputs a model computes one at a time."""

    sequences: Sequence[Sample]
    loss: Callable[[list[Tensor]], Tensor]
    """Function from the outputs of all sequences to the loss. A language model's output is the log-probs (A,)
    of a sequence's actions, with `entropy` (A, 2): log-probs and entropies. A reward model's output is the
    score () of the last token."""
    formula: str
    """Description of the formula."""
    temperature: float = 1.0
    entropy: bool = False


def plain_loss(
    objective: Any, items: Any, reference: Reference | None = None, config: Any = None
) -> PlainLoss | None:
    """Returns the plain loss of an objective on the items of an optimizer step; None if the objective has no
    plain formula. `items`: items of the dataset, or the batch of a policy. `reference`: required by DPO and
    KTO. `config`: the run's, required by policies."""
    match objective:
        case SFTObjective():
            loss = lambda outputs: plain_sft(outputs, sum(map(len, outputs)))
            return PlainLoss(items, loss, "-mean(log-probs of all actions)")
        case RewardObjective():
            margins = torch.tensor([pair.margin for pair in items], dtype=torch.float64)
            loss = lambda outputs: plain_rm(outputs, margins, len(items))
            return PlainLoss(both_answers(items), loss, "-mean(log sigmoid(chosen - rejected - margin))")
        case DPOObjective():
            answers = both_answers(items)
            known = [not_none(reference)(answer).sum() for answer in answers]
            loss = lambda outputs: plain_dpo(objective, outputs, known, len(items))
            formula = "mean((h - 1 / (2 beta))^2)" if objective.ipo else "-mean(log sigmoid(beta h))"
            return PlainLoss(answers, loss, f"{formula}, h of summed log-probs")
        case KTOObjective():
            return kto(items, objective, not_none(reference))
        case PolicyObjective():
            return policy(items, objective, config)
    return None


def kto(examples: Sequence[UnpairedExample], objective: KTOObjective, reference: Reference) -> PlainLoss:
    count, desirable = len(examples), [example.desirable for example in examples]
    sequences = [example.sample for example in examples] + [example.mismatched for example in examples]
    known = [reference(sequence).sum() for sequence in sequences]

    def loss(outputs: list[Tensor]) -> Tensor:
        pairs = zip(outputs[count:], known[count:], strict=True)
        kl = fmean(float(output.detach().sum() - of_reference) for output, of_reference in pairs)
        of_step = replace(objective, kl=max(0.0, kl))
        return plain_kto(of_step, outputs[:count], known[:count], desirable, count)

    formula = "mean(w (1 - sigmoid(+-beta (log ratio - kl)))), kl of mismatched answers"
    return PlainLoss(sequences, loss, formula)


def policy(batch: Batch, objective: PolicyObjective, config: PPOConfig) -> PlainLoss:
    """Returns the policy loss of the run's flags. Losses, corrections and anchors of the user are computed by
    the objective itself, from plain log-probs."""
    row, is_known = ExperienceRow.of(batch), is_covered(config)
    totals = None if row.prompts is None else row.prompts.bincount(minlength=1)
    norm = LossNorm(row.num_tokens, row.num_sequences, totals)
    has_entropy = bool(config.actor.entropy_coef) or not is_known

    def loss(outputs: list[Tensor]) -> Tensor:
        output = torch.cat(outputs)
        log_probs, entropy = output.unbind(1) if has_entropy else (output, None)
        there = row.to(output.device)
        if is_known:
            return plain_policy_loss(config, there, norm, log_probs, entropy, config.algo.kl.init_coef)
        return objective(lambda *_, **__: TokenScores(log_probs, entropy), there, norm)[0]

    formula = f"{objective.loss_type} as {'in its paper' if is_known else 'the run computes it'}"
    return PlainLoss(samples_of(batch), loss, formula, config.rollout.temperature, has_entropy)


def both_answers(pairs: Sequence[Pair]) -> list[Sample]:
    return [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]


def samples_of(batch: Batch) -> list[Sample]:
    lengths = batch.lengths.tolist()
    ids = torch.from_numpy(batch.token_ids).long().split(lengths)
    masks = torch.from_numpy(batch.action_mask).split(lengths)
    return [Sample(token_ids=i, action_mask=m) for i, m in zip(ids, masks, strict=True)]
