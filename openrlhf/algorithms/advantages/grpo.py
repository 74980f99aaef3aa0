from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import deviations, group_std
from openrlhf.algorithms.tensor import Tensor


class GRPO(AdvantageEstimator):
    """Group relative policy optimization (GRPO): (reward - group mean) / group standard deviation.

    DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models,
    https://arxiv.org/abs/2402.03300

        A_i = (R_i - mean(R)) / (std(R) + 1e-9)

    The standard deviation is the unbiased one, with divisor n - 1. In a group of equal rewards, and so in a
    singleton group, all advantages are 0.
    """

    name = "group_norm"
    needs_group = True

    def shape(self, step: StepView) -> Tensor:
        rewards, group_ids = step.rewards, step.group_ids
        return (deviations(rewards, group_ids) / (group_std(rewards, group_ids) + 1e-9)).to(rewards.dtype)
