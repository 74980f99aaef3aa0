"""KL(policy || reference) estimated from the policy's samples, and the controller of its coefficient."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor


def approx_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """(A,) -> (A,), each in [-10, 10]. http://joschu.net/blog/kl-approx.html

    With d = log pi - log pi_ref:   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d
    """
    log_ratio = (log_probs.float() - ref_log_probs.float()).clamp(-20, 20)
    return KL_ESTIMATORS[estimator](log_ratio).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KLController:
    """The KL coefficient as it stands: fixed, or led towards `target`. Part of a checkpoint."""

    coef: float
    target: float | None = None
    """KL per token to aim for. None keeps the coefficient."""
    horizon: int = 10000
    """Samples over which the coefficient may change by a fifth."""

    def update(self, kl: float, num_samples: int) -> Self:
        """Returns the controller after a step of `num_samples` whose mean KL was `kl`.
        https://arxiv.org/abs/1909.08593, section 2.2

            coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1))

        The paper has no minimum: with more than five horizons in a step its coefficient may become negative,
        and then pays the policy for leaving the reference.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * min(num_samples / self.horizon, 1)))
