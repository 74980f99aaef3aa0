from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
from openrlhf.algorithms.tensor import Tensor


class FlashReinforce(AdvantageEstimator):
    """FlashREINFORCE: reward minus the mean of the step, not whitened.

        A_i = R_i - mean(R over all samples of the step)

    The samples of a prompt are not compared, so one sample of each prompt is enough. The advantage keeps the
    scale of the rewards.
    """

    name = "flash_reinforce"

    def shape(self, step: StepView) -> Tensor:
        return (step.rewards - step.rewards.double().mean()).to(step.rewards.dtype)
