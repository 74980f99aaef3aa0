from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.algorithms.tensor import Tensor


class Recomputed(ProximalPolicy):
    """The policy before this step's update.

    AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning,
    https://arxiv.org/abs/2505.24298

        pi_prox = pi_old

    In a step with a single optimizer step, pi_prox equals the policy, and needs no separate forward pass.
    """

    name = "recomputed"
    needs_forward = True

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        rollout_log_probs: Tensor,
        staleness: Tensor | None,
    ) -> Tensor:
        return log_probs if old_log_probs is None else old_log_probs
