"""The commands' losses as plain formulas of a model's outputs, which it computes one sequence at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.api import (
    Batch,
    DPOObjective,
    ExperienceRow,
    KTOObjective,
    LossNorm,
    Pair,
    PolicyObjective,
    RewardObjective,
    Sample,
    SFTObjective,
    TokenScores,
    UnpairedExample,
    present,
)
from openrlhf.tools.selftest.plain import plain_dpo, plain_kto, plain_rm, plain_sft

Reference = Callable[[Sample], Tensor]
"""Function from a sequence to the log-probs (A,) of its actions under a reference model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainLoss:
    """A loss of sequences whose outputs a model computes one at a time."""

    sequences: Sequence[Sample]
    loss: Callable[[list[Tensor]], Tensor]
    """Function from the outputs of all sequences to the loss. A language model's output is the log-probs (A,)
    of a sequence's actions, with `entropy` (A, 2): log-probs and entropies. A reward model's output is the
    score () of the last token."""
    temperature: float = 1.0
    entropy: bool = False
    formula: str
    """Description of the formula."""


def plain_loss(objective: Any, items: Any, reference: Reference | None) -> PlainLoss | None:
    """Returns the plain loss of an objective on the items of an optimizer step; None if the objective has no
    plain formula. `items`: items of the dataset, or the batch of a policy. `reference`: required by DPO and
    KTO."""
    match objective:
        case SFTObjective():
            return sft(items)
        case RewardObjective():
            return rm(items)
        case DPOObjective():
            return dpo(items, objective, present(reference))
        case KTOObjective():
            return kto(items, objective, present(reference))
        case PolicyObjective():
            return policy(items, objective)
    return None


def sft(samples: Sequence[Sample]) -> PlainLoss:
    return PlainLoss(
        sequences=samples,
        loss=lambda outputs: plain_sft(outputs, sum(map(len, outputs))),
        formula="-mean(log-probs of all actions)",
    )


def rm(pairs: Sequence[Pair]) -> PlainLoss:
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    return PlainLoss(
        sequences=both_answers(pairs),
        loss=lambda outputs: plain_rm(outputs, margins, len(pairs)),
        formula="-mean(log sigmoid(chosen - rejected - margin))",
    )


def dpo(pairs: Sequence[Pair], objective: DPOObjective, reference: Reference) -> PlainLoss:
    sequences = both_answers(pairs)
    of_reference = [reference(sequence).sum() for sequence in sequences]
    formula = "mean((h - 1 / (2 beta))^2)" if objective.ipo else "-mean(log sigmoid(beta h))"
    return PlainLoss(
        sequences=sequences,
        loss=lambda outputs: plain_dpo(objective, outputs, of_reference, len(pairs)),
        formula=f"{formula}, h of summed log-probs",
    )


def kto(examples: Sequence[UnpairedExample], objective: KTOObjective, reference: Reference) -> PlainLoss:
    count, desirable = len(examples), [example.desirable for example in examples]
    sequences = [example.sample for example in examples] + [example.mismatched for example in examples]
    of_reference = [reference(sequence).sum() for sequence in sequences]

    def loss(outputs: list[Tensor]) -> Tensor:
        pairs = zip(outputs[count:], of_reference[count:], strict=True)
        ratios = [output.detach().sum() - ref.to(output) for output, ref in pairs]
        kl = float(torch.stack(ratios).mean().clamp(min=0))
        objective_of_step = replace(objective, kl=kl)
        return plain_kto(objective_of_step, outputs[:count], of_reference[:count], desirable, count)

    return PlainLoss(
        sequences=sequences,
        loss=loss,
        formula="mean(w (1 - sigmoid(+-beta (log ratio - kl)))), kl of mismatched answers",
    )


def policy(batch: Batch, objective: PolicyObjective) -> PlainLoss:
    """Returns PPO's clipped loss as a plain formula. Other policy losses, corrections and aggregations are
    computed by the objective itself, from plain log-probs."""
    is_ppo = objective.loss_type == "ppo" and objective.aggregation in (None, "token_mean")
    is_ppo &= objective.proximal_policy == "recomputed" and objective.correction is None
    is_ppo &= objective.dual_clip is None and batch.staleness is None
    row = ExperienceRow.of(batch)
    norm = LossNorm(row.num_tokens, row.num_sequences)

    def of_formula(outputs: list[Tensor]) -> Tensor:
        output = torch.cat(outputs)
        log_probs = output[:, 0] if objective.entropy_coef else output
        to = lambda column: present(column).to(log_probs)
        ratio, advantages = (log_probs - to(row.old_log_probs)).exp(), to(row.advantages)
        clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        if objective.kl_coef > 0:
            d = log_probs - to(row.ref_log_probs)
            kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[objective.kl_estimator]
            loss = loss + objective.kl_coef * kl.mean()
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * output[:, 1].mean()
        return loss

    def of_objective(outputs: list[Tensor]) -> Tensor:
        output = torch.cat(outputs)
        device = output.device
        scores = TokenScores(output[:, 0], output[:, 1])
        return objective(lambda *_, **__: scores, row.to(device), norm)[0]

    return PlainLoss(
        sequences=samples_of(batch),
        loss=of_formula if is_ppo else of_objective,
        temperature=objective.temperature,
        entropy=bool(objective.entropy_coef) or not is_ppo,
        formula="-mean(min(r A, clip(r) A))" if is_ppo else f"{objective.loss_type} as the run computes it",
    )


def both_answers(pairs: Sequence[Pair]) -> list[Sample]:
    return [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]


def samples_of(batch: Batch) -> list[Sample]:
    """Returns the sequences of a batch."""
    lengths = batch.lengths.tolist()
    ids = torch.from_numpy(batch.token_ids).long().split(lengths)
    masks = torch.from_numpy(batch.action_mask).split(lengths)
    return [Sample(token_ids=i, action_mask=m) for i, m in zip(ids, masks, strict=True)]
