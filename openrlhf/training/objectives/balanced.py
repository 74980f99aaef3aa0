"""The load-balancing loss of experts, added to another objective."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from openrlhf.backends.base import Objective, RowT
from openrlhf.models.experts import recorded_balance
from openrlhf.rows import LossNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedObjective(Generic[RowT]):
    """The loss objective + coef * balance. `balance` is the mean of the rows' load-balancing losses, weighted
    by the rows' numbers of actions.

    The load-balancing loss is not a sum over tokens, so this term, unlike all others, depends on which
    sequences share a row. With one row per step it equals transformers' own.
    """

    objective: Objective[RowT]
    coef: float
    metric: str = "balance_loss"

    def __call__(self, model: Callable, batch: RowT, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` wraps a Hugging Face model as its `.model`, and may itself be wrapped by an engine."""
        module: Any = getattr(model, "module", model)
        with recorded_balance(module) as losses:
            loss, metrics = self.objective(model, batch, norm)
        # The last recorded pass is the trained model's: objectives call the reference first.
        balance = losses[-1] * (batch.num_tokens / norm.num_tokens)
        return loss + self.coef * balance, metrics | {self.metric: balance.detach()}
