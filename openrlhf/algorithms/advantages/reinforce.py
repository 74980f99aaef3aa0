from openrlhf.algorithms.advantages.base import AdvantageEstimator


class Reinforce(AdvantageEstimator):
    """REINFORCE++: discounted returns, whitened over the step.

    REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models,
    https://arxiv.org/abs/2501.03262

        A_t = G_t = r_t + gamma * G_{t+1}

    The mean over all actions of the step is the baseline, so one sample of each prompt is enough.
    """

    name = "reinforce"
    discounts = True
    whiten = True
