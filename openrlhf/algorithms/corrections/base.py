"""Base class of off-policy corrections, and their view of a row."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from openrlhf.algorithms.tensor import Tensor
from openrlhf.registry import Selectable

Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerGap:
    """How far the sampler is from the proximal policy, on the A actions of B sequences."""

    log_ratio: Tensor
    """(A,) log(pi_prox / pi_behave) of tokens or of sequences, as the policy loss says, within [-20, 20]."""
    counts: Tensor
    """(B,) number of actions of each sequence; they add up to A."""
    bounds: Bounds
    """(low, high) of the ratio, `--algo.advantage.is_correction_threshold`."""
    sequence_bounds: Bounds | None = None
    """(low, high) of sequences, `--algo.advantage.is_correction_sequence_threshold`; None: same as
    `bounds`."""
    staleness: Tensor | None = None
    """(A,) steps by which the weights that sampled an action are behind; None if nothing is stale."""


class Correction(Selectable, ABC):
    """A weight for the loss of each action, through which no gradient flows.

    Decoupled PPO (https://arxiv.org/abs/2110.00641) has three policies: pi (being trained), pi_behave (the
    sampler) and pi_prox (the anchor of the clipped ratio). The loss clips pi / pi_prox; a correction
    multiplies it by a function of pi_prox / pi_behave. Actions of weight 0 still count in the divisor of the
    loss, so that dropping them does not raise the step size.
    """

    drops_sequences: ClassVar[bool] = False
    """True if it reads `SamplerGap.sequence_bounds`."""

    @abstractmethod
    def __call__(self, gap: SamplerGap) -> Tensor:
        """Returns the weights (A,)."""
