from typing import Literal

from openrlhf.algorithms.corrections.base import Correction, SamplerMismatch
from openrlhf.algorithms.reductions import segment_mean, spread
from openrlhf.algorithms.tensor import Tensor


class Gated(Correction):
    """Weighs tokens by their ratio, and bounds a statistic of tokens or sequences:
    `--algo.advantage.is_correction_level` and the flags beside it.

        mask: w_t = ratio where low <= statistic <= high, else 0
        clip: w_t = clip(ratio, low, high)

    The statistic of a token is its ratio, or the divergence of two distributions over two events, the sampled
    token and all others, where p is the sampler's and q the trainer's probability of the sampled token:

        binary_kl: p log(p / q) + (1 - p) log((1 - p) / (1 - q))        tv: |p - q|

    The statistic of a sequence is the geometric mean of the ratios, or the mean of the divergences. Masking
    by a divergence makes a trust region: Rethinking the Trust Region in LLM Reinforcement Learning,
    https://arxiv.org/abs/2602.04879
    """

    level: Literal["token", "seq"] = "token"
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"

    def __call__(self, mismatch: SamplerMismatch) -> Tensor:
        ratio, (low, high) = mismatch.log_ratio.exp(), mismatch.bounds
        if self.mode == "clip":
            return ratio.clamp(low, high)
        statistic = mismatch.log_ratio if self.gating == "ratio" else self._divergence(mismatch)
        if self.level == "seq":
            statistic = spread(segment_mean(statistic, mismatch.counts), mismatch.counts, len(ratio))
        if self.gating == "ratio":
            statistic = statistic.exp()
        return ratio.masked_fill(~((low <= statistic) & (statistic <= high)), 0)

    def _divergence(self, mismatch: SamplerMismatch) -> Tensor:
        """Returns the divergence at each action, (A,)."""
        p, q = mismatch.rollout_log_probs.exp(), mismatch.log_probs.exp()
        if self.gating == "tv":
            return (p - q).abs()
        # expm1 keeps the probability of all other tokens where that of the sampled one rounds to 1
        others_p, others_q = (-x.expm1() for x in (mismatch.rollout_log_probs, mismatch.log_probs))
        smallest = 1e-12  # a log-prob may round to 0
        others = others_p.clamp(min=smallest).log() - others_q.clamp(min=smallest).log()
        return p * (mismatch.rollout_log_probs - mismatch.log_probs) + others_p * others
