from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import center
from openrlhf.algorithms.tensor import Tensor


class ReinforceBaseline(AdvantageEstimator):
    """REINFORCE++-baseline, minus the group's mean and whitened over the step.

    REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models,
    https://arxiv.org/abs/2501.03262

        A_i = R_i - mean(R)

    The deviation is that of the whole step, not of a group. A sample alone in its group earns 0.
    """

    name = "reinforce_baseline"
    needs_group = True
    whiten = True

    def shape(self, step: StepView) -> Tensor:
        return center(step.rewards, step.group_ids)
