"""PPO-ptx: a pre-training loss added to the policy's objective."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.rows import LossNorm, PackedRow
from openrlhf.training.objectives.sft import SFTObjective


@dataclass(frozen=True, kw_only=True, slots=True)
class PTXObjective:
    """The loss coef * mean negative log-likelihood of the step's texts.

    It is the second term of equation 2 in https://arxiv.org/abs/2203.02155, as a mean over tokens.
    """

    coef: float

    def __call__(self, model: Callable, batch: PackedRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        loss, _ = SFTObjective()(model, batch, norm)
        return self.coef * loss, {"policy/ptx_loss": loss.detach()}
