"""Base class of off-policy corrections, and their view of a row."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from openrlhf.algorithms.tensor import Tensor
from openrlhf.registry import Selectable

Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerMismatch:
    """The difference between sampler and proximal policy on the A actions of B sequences, as a correction
    sees it."""

    log_ratio: Tensor
    """(A,) log(pi_prox / pi_behave) of tokens or of sequences, see `PolicyLoss.ratio`, within [-20, 20]."""
    log_probs: Tensor
    """(A,) log pi_prox."""
    rollout_log_probs: Tensor
    """(A,) log pi_behave, the log-probs of the sampler."""
    counts: Tensor
    """(B,) number of actions of each sequence; they add up to A."""
    bounds: Bounds
    """(low, high), `--algo.advantage.is_correction_threshold`; low is 0 if the flag has an upper bound
    only."""
    sequence_bounds: Bounds | None = None
    """(low, high) of sequences, `--algo.advantage.is_correction_sequence_threshold`; None: same as
    `bounds`."""
    staleness: Tensor | None = None
    """(A,) age in steps of the weights that sampled each action; None if all are current."""


SamplerGap = SamplerMismatch
"""Its name in files of users that are older."""


class Correction(Selectable, ABC):
    """Weights of the actions' losses, through which no gradient flows.

    Decoupled PPO (https://arxiv.org/abs/2110.00641) has three policies: pi (being trained), pi_behave (the
    sampler) and pi_prox (the anchor of the clipped ratio). The loss clips pi / pi_prox; a correction
    multiplies it by a function of pi_prox / pi_behave. The divisor of the loss still counts actions of weight
    0, so that dropping them does not raise the step size.
    """

    drops_sequences: ClassVar[bool] = False
    """True if it reads `SamplerMismatch.sequence_bounds`."""

    @abstractmethod
    def __call__(self, mismatch: SamplerMismatch) -> Tensor:
        """Returns the weights (A,)."""
