"""Base class of policy losses, and their view of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from openrlhf.registry import Selectable

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.rows import LossNorm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowView:
    """The A actions of the B sequences of one forward pass, as a policy loss sees them. Gradients flow
    through `log_probs`, `log_ratio` and `entropy` only."""

    log_probs: Tensor
    """(A,) log pi, the log-probs of the policy being trained."""
    log_ratio: Tensor
    """(A,) log(pi / pi_prox) of tokens or of sequences, see `PolicyLoss.ratio`, within [-20, 20]."""
    advantages: Tensor
    """(A,) advantages."""
    counts: Tensor
    """(B,) number of actions of each sequence; they add up to A."""
    clip_low: float
    """Distance by which the ratio may fall below 1: `--actor.eps_clip` or `--actor.eps_clip_low_high`."""
    clip_high: float
    """Distance by which the ratio may rise above 1."""
    dual_clip: float | None
    """Bound of the loss for negative advantages, `--actor.dual_clip`; None: no bound."""
    proximal_log_probs: Tensor
    """(A,) log pi_prox."""
    old_log_probs: Tensor | None
    """(A,) log-probs of the policy before this step's updates; None if they are not computed."""
    rollout_log_probs: Tensor
    """(A,) log-probs of the sampler."""
    staleness: Tensor | None
    """(A,) age in steps of the weights that sampled each action; None if all are current."""
    entropy: Tensor | None
    """(A,) entropies of the policy; None without `PolicyLoss.needs_entropy` and `--actor.entropy_coef`."""
    norm: LossNorm
    """Numbers of actions and sequences of the optimizer step, over all rows and ranks."""


class PolicyLoss(Selectable, ABC):
    """A loss of each action. The mean over actions, KL, entropy bonus and off-policy correction are added
    outside."""

    ratio: ClassVar[Literal["token", "sequence"]] = "token"
    """Whether the probability ratio, in the loss and in the off-policy correction, is per token or per
    sequence."""
    dual_clip: ClassVar[bool] = False
    """True if it reads `RowView.dual_clip`, the bound for negative advantages."""
    needs_entropy: ClassVar[bool] = False
    """True if it reads `RowView.entropy`."""

    @classmethod
    def aggregation(cls) -> str:
        """Returns the default of `--actor.loss_aggregation`."""
        return "sample_mean" if cls.ratio == "sequence" else "token_mean"

    @abstractmethod
    def __call__(self, row: RowView) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three tensors (A,): the loss of each action, and whether its lower and its upper bound are
        active (bool)."""
