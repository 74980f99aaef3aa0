from openrlhf.algorithms.corrections.base import Correction, SamplerGap
from openrlhf.algorithms.tensor import Tensor


class IcePop(Correction):
    """Drops tokens outside the threshold (IcePop).

    Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model,
    https://arxiv.org/abs/2510.18855

        w_t = ratio where low <= ratio <= high, else 0
    """

    name = "icepop"

    def __call__(self, gap: SamplerGap) -> Tensor:
        ratio, (low, high) = gap.log_ratio.exp(), gap.bounds
        return ratio.masked_fill(~((low <= ratio) & (ratio <= high)), 0)
