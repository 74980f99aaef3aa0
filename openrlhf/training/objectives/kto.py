"""The objective of KTO, and the statistics of a whole batch that it needs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.preference.kto import kto_loss
from openrlhf.rows import LossNorm, UnpairedRow
from openrlhf.training.objectives.reference import Reference, answer_log_probs, reference_log_probs


def unpaired_log_probs(model: Callable, batch: UnpairedRow) -> Tensor:
    """Returns the summed log-probs of each answer and of its mismatched answer, (B, 2)."""
    both = [answer_log_probs(model, row)[: batch.num_sequences] for row in (batch.row, batch.mismatched)]
    return torch.stack(both, dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOObjective:
    """Mean over answers of `kto_loss`."""

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0
    """Estimate of KL(policy || reference) over the step's whole batch, see `MismatchedLogRatio`."""
    desirable_fraction: float = 0.5
    """Fraction of desirable answers among the step's answers. Used in metrics only."""
    reference: Reference | None = None
    """Function that computes reference log-probs; not needed if they are precomputed."""

    def __call__(
        self, model: Callable, batch: UnpairedRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        count = batch.num_sequences
        ref = reference_log_probs(batch.ref_log_probs, self.reference, batch.row)
        ratios = answer_log_probs(model, batch.row)[:count] - ref[:count]
        losses = kto_loss(
            ratios,
            batch.desirable,
            self.kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = losses.sum() / norm.num_sequences
        rewards = self.beta * ratios.detach()
        mean = lambda x: x.sum() / norm.num_sequences
        metrics = {
            "kto/loss": loss.detach(),
            "kto/kl": loss.new_full((), self.kl * count / norm.num_sequences),
            "kto/accuracy": mean((rewards > 0) == batch.desirable),
            "kto/desirable_reward": mean(rewards * batch.desirable) / max(self.desirable_fraction, 1e-6),
            "kto/undesirable_reward": mean(rewards * ~batch.desirable)
            / max(1 - self.desirable_fraction, 1e-6),
        }
        return loss, metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchedLogRatio:
    """A loss of 0 whose metrics are statistics of a batch: the mean log ratio log pi - log pi_ref over
    mismatched answers, from which KTO estimates the KL, and the fraction of desirable answers."""

    reference: Reference | None = None

    def __call__(
        self, model: Callable, batch: UnpairedRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        count = batch.num_sequences
        ref = reference_log_probs(batch.ref_mismatched, self.reference, batch.mismatched)
        ratios = answer_log_probs(model, batch.mismatched)[:count] - ref[:count]
        figures = {
            "log_ratio": ratios.sum() / norm.num_sequences,
            "desirable_fraction": batch.desirable.sum() / norm.num_sequences,
        }
        return ratios.sum() * 0, figures
