from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.algorithms.tensor import Tensor


class Interpolated(ProximalPolicy):
    """Interpolation between sampler and policy, closer to the policy for staler actions, without a forward
    pass (A-3PO).

    A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation,
    https://arxiv.org/abs/2512.06547

        log pi_prox = alpha log pi_behave + (1 - alpha) log pi,   alpha = 1 / max(staleness, 1)

    Thus pi / pi_prox is (pi / pi_behave)^alpha. Up to staleness 1, pi_prox is the sampler. Staleness is
    measured at the start of the step.
    """

    name = "interpolated"

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        rollout_log_probs: Tensor,
        staleness: Tensor | None,
    ) -> Tensor:
        if staleness is None:
            return rollout_log_probs
        of_policy = 1 - 1 / staleness.clamp(min=1)
        return rollout_log_probs + of_policy * (log_probs - rollout_log_probs)
