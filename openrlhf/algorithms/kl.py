"""Estimates KL(policy || reference) from the policy's samples, and controls the coefficient of the KL
penalty."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from openrlhf.algorithms.tensor import Tensor


def approx_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) per action: (A,) -> (A,), clamped to [-10, 10].
    http://joschu.net/blog/kl-approx.html

    With d = log pi - log pi_ref:   k1 = d,   k2 = d^2 / 2,   k3 = exp(-d) - 1 + d
    """
    log_ratio = (log_probs.float() - ref_log_probs.float()).clamp(-20, 20)
    return KL_ESTIMATORS[estimator].of(log_ratio).clamp(-10, 10)


def unbiased_gradient(kl: Tensor, log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns the estimate `kl` (A,) with another gradient: that of KL(policy || reference), whatever the
    estimator, for samples of the policy before its updates, `old_log_probs`.
    Rethinking KL Regularization in RLHF, https://arxiv.org/abs/2510.01555

        gradient: min(pi / pi_old, 10) * log(pi / pi_ref) * grad log pi
    """
    now = log_probs.detach()
    weight = (now - old_log_probs).exp().clamp(max=10)
    log_ratio = (now - ref_log_probs).clamp(-20, 20)
    return kl.detach() + weight * log_ratio * (log_probs - now)


@dataclass(frozen=True, slots=True)
class KLEstimate:
    """A way to estimate KL(policy || reference) from samples of the policy."""

    summary: str
    """Description in `--help`."""
    of: Callable[[Tensor], Tensor]
    """Maps log ratios (A,) to estimates (A,)."""
    has_gradient: bool
    """True if its expected gradient over the policy's samples is not zero. Estimators with a gradient suit
    the loss, the others the reward."""


KL_ESTIMATORS: Mapping[str, KLEstimate] = {
    "k1": KLEstimate("the log ratio, for the reward", lambda d: d, has_gradient=False),
    "k2": KLEstimate("half its square, for the loss", lambda d: d**2 / 2, has_gradient=True),
    "k3": KLEstimate(
        "exp(-log ratio) - 1 + log ratio, for the loss", lambda d: (-d).exp() - 1 + d, has_gradient=True
    ),
}
"""Estimators by their names in `--algo.kl.estimator`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLController:
    """The current KL coefficient: fixed, or adapted towards `target`. Checkpoints contain it."""

    coef: float
    target: float | None = None
    """Target KL per token, in nats. None: the coefficient is fixed."""
    horizon: int = 10000
    """Number of samples over which the coefficient changes by at most 20 %."""

    def update(self, kl: float, num_samples: int) -> Self:
        """Returns the controller after a step of `num_samples` samples with mean KL `kl`.
        https://arxiv.org/abs/1909.08593, section 2.2

            coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1))

        The paper has no `min`. Without it, a step of more than five horizons could make the coefficient
        negative, which would reward the policy for leaving the reference.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * min(num_samples / self.horizon, 1)))
