from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.returns import generalized_advantages
from openrlhf.algorithms.tensor import Tensor


class GAE(AdvantageEstimator):
    """PPO with a critic, by generalized advantage estimation (GAE).

    High-Dimensional Continuous Control Using Generalized Advantage Estimation,
    https://arxiv.org/abs/1506.02438

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lambda * A_{t+1},   G_t = A_t + V_t

    An action bootstraps from the next action of its sequence, also across environment feedback; the last one
    from 0. Advantages are whitened over the step.
    """

    name = "gae"
    needs_critic = True
    discounts = True
    whiten = True

    def advantages(self, rewards: Tensor, step: StepView) -> tuple[Tensor, Tensor]:
        assert step.values is not None  # needs_critic
        return generalized_advantages(rewards, step.values, step.counts, step.gamma, step.lambd)
