from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.algorithms.tensor import Tensor


class CISPO(PolicyLoss):
    """Clipped importance sampling policy optimization (CISPO): log-probs weighted by the clipped ratio of
    tokens, so that every token keeps a gradient.

    MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention,
    https://arxiv.org/abs/2506.13585, eq. 4 and 5

        l_t = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi

    No gradient flows through the weight. A bound is active where the ratio is beyond it, whatever the
    advantage. There is no dual clip, since the weight is already bounded.
    """

    name = "cispo"

    def __call__(self, row: RowView) -> tuple[Tensor, Tensor, Tensor]:
        ratio = row.log_ratio.detach().exp()
        weight = ratio.clamp(1 - row.clip_low, 1 + row.clip_high)
        return -weight * row.advantages * row.log_probs, ratio < weight, ratio > weight
