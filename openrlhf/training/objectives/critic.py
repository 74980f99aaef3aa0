"""The critic's objective: values that predict returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from openrlhf.algorithms.reductions import token_mean
from openrlhf.algorithms.value_loss import clipped_value_loss
from openrlhf.config.ppo import PPOConfig
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.types import not_none


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticObjective:
    """The mean over actions of `clipped_value_loss`."""

    value_clip: float

    @classmethod
    def from_config(cls, config: PPOConfig) -> Self:
        """Builds the objective from the flags."""
        return cls(value_clip=config.critic.value_clip)

    def __call__(
        self, model: Callable, batch: ExperienceRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.scorer.ValueModel`, possibly wrapped by an engine."""
        values = model(batch.row)
        losses, clipped = clipped_value_loss(
            values, not_none(batch.values), batch.returns, clip=self.value_clip
        )
        loss = token_mean(losses, norm)
        return loss, {
            "critic/loss": loss.detach(),
            "critic/clip_fraction": token_mean(clipped.float(), norm),
            "critic/value_mean": token_mean(values.detach(), norm),
        }
