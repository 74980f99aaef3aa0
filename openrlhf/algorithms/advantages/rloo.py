from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import group_sums
from openrlhf.algorithms.tensor import Tensor


class RLOO(AdvantageEstimator):
    """REINFORCE leave-one-out (RLOO): reward minus the mean reward of the group's other samples.

    Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs,
    https://arxiv.org/abs/2402.14740

        A_i = R_i - sum_{j != i} R_j / (n - 1)

    The baseline does not depend on the sample itself, so the gradient is unbiased. A sample in a singleton
    group has advantage 0.
    """

    name = "rloo"
    needs_group = True

    def shape(self, step: StepView) -> Tensor:
        rewards = step.rewards
        totals, sizes = group_sums(rewards, step.group_ids)
        baseline = (totals - rewards) / (sizes - 1).clamp(min=1)
        return (rewards - baseline).where(sizes > 1, 0).to(rewards.dtype)
