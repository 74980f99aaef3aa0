"""Adds the experts' balance loss to an objective."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from openrlhf.backends.base import Objective, RowT
from openrlhf.models.experts import recorded_balance
from openrlhf.types import LossNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedObjective(Generic[RowT]):
    """objective + coef * balance, where balance is the mean over rows, weighted by their actions, of each
    row's balance loss.

    The balance loss is not linear in its tokens. So this one term depends on which sequences share a row;
    with one row in a step it is transformers' own.
    """

    objective: Objective[RowT]
    coef: float
    metric: str = "balance_loss"

    def __call__(self, model: Callable, batch: RowT, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` wraps a Hugging Face model as its `.model`, and may itself be wrapped by an engine."""
        module: Any = getattr(model, "module", model)
        with recorded_balance(module) as losses:
            loss, metrics = self.objective(model, batch, norm)
        # The last pass is the trained model's: objectives call a reference first.
        balance = losses[-1] * (batch.num_tokens / norm.num_tokens)
        return loss + self.coef * balance, metrics | {self.metric: balance.detach()}
