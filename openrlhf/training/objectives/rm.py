"""The objective of reward models on pairs of answers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.preference.reward_model import pairwise_loss
from openrlhf.rows import LossNorm, PairRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardObjective:
    """Mean over pairs of -log sigmoid(score of the chosen - score of the rejected - margin)."""

    def __call__(self, model: Callable, batch: PairRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.scorer.ScoreModel`, possibly wrapped by an engine."""
        chosen, rejected = batch.by_pair(model(batch.row)).unbind(1)
        loss = pairwise_loss(chosen, rejected, batch.margins).sum() / norm.num_sequences
        metrics = {
            "rm/loss": loss.detach(),
            "rm/accuracy": (chosen > rejected).sum() / norm.num_sequences,
            "rm/chosen_score": chosen.detach().sum() / norm.num_sequences,
            "rm/rejected_score": rejected.detach().sum() / norm.num_sequences,
        }
        return loss, metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreMoments:
    """A loss of 0 whose metrics are the mean of all scores and of their squares."""

    def __call__(self, model: Callable, batch: PairRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        scores = batch.by_pair(model(batch.row)).double()
        count = 2 * norm.num_sequences
        return scores.sum() * 0, {"mean": scores.sum() / count, "square": (scores**2).sum() / count}
