from openrlhf.algorithms.corrections.base import Correction, SamplerMismatch
from openrlhf.algorithms.tensor import Tensor


class TIS(Correction):
    """Truncated importance sampling (TIS), which clips the weight of each token.

    Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    https://fengyao.notion.site/off-policy-rl

        w_t = clip(ratio, low, high)
    """

    name = "tis"

    def __call__(self, mismatch: SamplerMismatch) -> Tensor:
        return mismatch.log_ratio.exp().clamp(*mismatch.bounds)
