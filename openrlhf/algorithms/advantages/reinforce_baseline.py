from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import center
from openrlhf.algorithms.tensor import Tensor


class ReinforceBaseline(AdvantageEstimator):
    """REINFORCE++-baseline: reward minus the group's mean, whitened over the step.

    REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models,
    https://arxiv.org/abs/2501.03262

        A_i = R_i - mean(R)

    Whitening divides by the standard deviation over the whole step, not over a group. A sample in a singleton
    group has the shaped reward 0.
    """

    name = "reinforce_baseline"
    needs_group = True
    whiten = True

    def shape(self, step: StepView) -> Tensor:
        return center(step.rewards, step.group_ids)
