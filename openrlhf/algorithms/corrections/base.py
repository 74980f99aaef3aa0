"""What an off-policy correction is given, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from openrlhf.registry import Selectable

if TYPE_CHECKING:
    from torch import Tensor

Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerGap:
    """How far the sampler is from the proximal policy, on the A actions of B sequences."""

    log_ratio: Tensor
    """(A,) log(pi_prox / pi_behave) of tokens or of sequences, as the policy loss says, within [-20, 20]."""
    counts: Tensor
    """(B,) actions of each sequence, which add up to A."""
    bounds: Bounds
    """`--algo.advantage.is_correction_threshold`"""
    sequence_bounds: Bounds | None = None
    """`--algo.advantage.is_correction_sequence_threshold`; None: those of tokens."""
    staleness: Tensor | None = None
    """(A,) steps by which the weights that chose an action are behind; None where nothing is stale."""


class Correction(Selectable, ABC):
    """A weight for the loss of each action, through which no gradient flows.

    Three policies: pi (being trained), pi_behave (the sampler) and pi_prox (from which the clip counts). The
    loss clips pi / pi_prox; a correction multiplies it by a function of pi_prox / pi_behave: decoupled PPO,
    https://arxiv.org/abs/2110.00641. A weight of 0 still counts in the divisor of the loss: dropping must not
    raise the step size.
    """

    drops_sequences: ClassVar[bool] = False
    """It reads `SamplerGap.sequence_bounds`."""

    @abstractmethod
    def __call__(self, gap: SamplerGap) -> Tensor:
        """Returns the weights (A,)."""
