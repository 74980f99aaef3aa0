from openrlhf.algorithms.proximal.base import ProximalPolicy
from openrlhf.algorithms.tensor import Tensor


class Rollout(ProximalPolicy):
    """The sampler, which costs no forward pass.

    Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347

        pi_prox = pi_behave

    As in the paper, the ratio is the importance weight policy / sampler.
    """

    name = "rollout"
    is_sampler = True

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        rollout_log_probs: Tensor,
        staleness: Tensor | None,
    ) -> Tensor:
        return rollout_log_probs
