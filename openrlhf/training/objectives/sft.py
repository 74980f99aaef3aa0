"""The objective of supervised fine-tuning."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.reductions import token_mean
from openrlhf.rows import LossNorm, PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTObjective:
    """Mean negative log-likelihood of the step's actions."""

    def __call__(self, model: Callable, batch: PackedRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        scores = model(batch, temperature=1.0, summed=True)
        loss = token_mean(-scores.log_probs, norm)
        return loss, {"sft/loss": loss.detach()}
