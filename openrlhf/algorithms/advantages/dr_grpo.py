from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.advantages.groups import center
from openrlhf.algorithms.tensor import Tensor


class DrGRPO(AdvantageEstimator):
    """GRPO without division by the standard deviation (Dr. GRPO, GRPO done right).

    Understanding R1-Zero-Like Training: A Critical Perspective, https://arxiv.org/abs/2503.20783

        A_i = R_i - mean(R)

    Without the division, prompts that are nearly always or nearly never solved weigh no more than others. The
    paper also divides the loss by a constant length, `--actor.loss_aggregation constant_length`. A sample in
    a singleton group has advantage 0.
    """

    name = "dr_grpo"
    needs_group = True

    def shape(self, step: StepView) -> Tensor:
        return center(step.rewards, step.group_ids)
