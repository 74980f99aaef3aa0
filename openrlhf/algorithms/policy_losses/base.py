"""What a policy loss is given, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from openrlhf.registry import Selectable

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.types import LossNorm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowView:
    """The A actions of B sequences that one forward pass reads, as a policy loss sees them. Gradients flow
    through `log_probs`, `log_ratio` and `entropy` alone."""

    log_probs: Tensor
    """(A,) log pi, of the policy in training."""
    log_ratio: Tensor
    """(A,) log(pi / pi_prox) of tokens or of sequences, as `PolicyLoss.ratio` says, within [-20, 20]."""
    advantages: Tensor
    """(A,)"""
    counts: Tensor
    """(B,) actions of each sequence, which add up to A."""
    clip_low: float
    """How far the ratio may fall below 1: `--actor.eps_clip` or `--actor.eps_clip_low_high`."""
    clip_high: float
    """How far it may rise above 1."""
    dual_clip: float | None
    """`--actor.dual_clip`"""
    proximal_log_probs: Tensor
    """(A,) log pi_prox."""
    old_log_probs: Tensor | None
    """(A,) of the policy before this step's updates; None where they are not computed before it."""
    rollout_log_probs: Tensor
    """(A,) of the sampler."""
    staleness: Tensor | None
    """(A,) steps by which the weights that chose an action are behind; None where nothing is stale."""
    entropy: Tensor | None
    """(A,) of the policy; None without `PolicyLoss.needs_entropy` and `--actor.entropy_coef`."""
    norm: LossNorm
    """How many actions and sequences the optimizer step has, over all rows and ranks."""


class PolicyLoss(Selectable, ABC):
    """A loss of each action. The mean over actions, KL, entropy bonus and off-policy correction are added
    outside."""

    ratio: ClassVar[Literal["token", "sequence"]] = "token"
    """What the probability ratio is of, here and in the off-policy correction."""
    dual_clip: ClassVar[bool] = False
    """It reads `RowView.dual_clip`, the bound for negative advantages."""
    needs_entropy: ClassVar[bool] = False
    """It reads `RowView.entropy`."""

    @classmethod
    def aggregation(cls) -> str:
        """Returns what the mean is over, unless `--actor.loss_aggregation` says something else."""
        return "sample_mean" if cls.ratio == "sequence" else "token_mean"

    @abstractmethod
    def __call__(self, row: RowView) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss of each action, and where its lower and its upper bound were active (bool), all
        (A,)."""
