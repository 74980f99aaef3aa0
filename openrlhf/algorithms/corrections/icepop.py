from openrlhf.algorithms.corrections.base import Correction, SamplerMismatch
from openrlhf.algorithms.tensor import Tensor


class IcePop(Correction):
    """Drops tokens outside the threshold (IcePop).

    Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model,
    https://arxiv.org/abs/2510.18855

        w_t = ratio where low <= ratio <= high, else 0
    """

    name = "icepop"

    def __call__(self, mismatch: SamplerMismatch) -> Tensor:
        ratio, (low, high) = mismatch.log_ratio.exp(), mismatch.bounds
        return ratio.masked_fill(~((low <= ratio) & (ratio <= high)), 0)
