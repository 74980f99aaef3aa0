"""Base class of proximal policies."""

from abc import ABC, abstractmethod
from typing import ClassVar

from openrlhf.algorithms.tensor import Tensor
from openrlhf.registry import Selectable


class ProximalPolicy(Selectable, ABC):
    """The anchor pi_prox of the clipped ratio pi / pi_prox: the clip bounds how far the policy moves away
    from it. No gradient flows through it."""

    needs_forward: ClassVar[bool] = False
    """True if it must be computed before the first update of a step, unless it is the policy itself."""
    is_sampler: ClassVar[bool] = False
    """True if it is the sampler, so that an off-policy correction has no effect."""

    @abstractmethod
    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        rollout_log_probs: Tensor,
        staleness: Tensor | None,
    ) -> Tensor:
        """Returns log pi_prox (A,). Arguments, all (A,): log pi without a gradient, the log-probs of the
        policy before this step's updates (None if not computed), the sampler's log-probs, and the staleness
        of each action (None: 0)."""
