"""What a proximal policy is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from openrlhf.registry import Selectable

if TYPE_CHECKING:
    from torch import Tensor


class ProximalPolicy(Selectable, ABC):
    """What the probability ratio is relative to: the clip bounds how far the policy moves away from it. No
    gradient flows through it."""

    needs_forward: ClassVar[bool] = False
    """It is computed before the first update of a step, where it is not the policy itself."""
    is_sampler: ClassVar[bool] = False
    """It is the sampler: a correction for the gap between the two has nothing to weigh."""

    @abstractmethod
    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        rollout_log_probs: Tensor,
        staleness: Tensor | None,
    ) -> Tensor:
        """Returns log pi_prox (A,), from log pi without a gradient, that of the policy before this step's
        updates (None where it is not computed), that of the sampler, and the staleness of each action (None:
        0), all (A,)."""
