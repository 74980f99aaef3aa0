"""Off-policy correction: for a sampler that is not quite the policy, by its kernels, precision or staleness.

Three policies: pi (being trained), pi_prox (the policy at the start of the step) and pi_behave (the sampler).
The loss clips pi / pi_prox; a correction multiplies it by a function of pi_prox / pi_behave, through which no
gradient flows. `log_ratio` (A,) is log(pi_prox / pi_behave), of tokens or of sequences, as `policy_loss`
computes it: clamped, so that no weight is infinite. A weight of 0 still counts in the divisor of the loss:
dropping must not raise the step size.
"""

from collections.abc import Callable

from torch import Tensor

from openrlhf.algos.reduce import mean, segment_mean, spread
from openrlhf.types import Metrics

Bounds = tuple[float, float]


def tis(
    log_ratio: Tensor, counts: Tensor, low: float, high: float, of_sequences: Bounds | None = None
) -> Tensor:
    """Truncated importance sampling: w = clip(ratio, low, high). https://fengyao.notion.site/off-policy-rl"""
    return log_ratio.exp().clamp(low, high)


def icepop(
    log_ratio: Tensor, counts: Tensor, low: float, high: float, of_sequences: Bounds | None = None
) -> Tensor:
    """Actions whose ratio is outside [low, high] are dropped. https://arxiv.org/abs/2510.18855"""
    ratio = log_ratio.exp()
    return ratio.masked_fill(~((low <= ratio) & (ratio <= high)), 0)


def seq_mask_tis(
    log_ratio: Tensor, counts: Tensor, low: float, high: float, of_sequences: Bounds | None = None
) -> Tensor:
    """Sequences whose geometric mean ratio is outside `of_sequences` (None: outside [low, high]) are dropped;
    the others are weighted as in `tis`."""
    lowest, highest = of_sequences or (low, high)
    geometric_mean = segment_mean(log_ratio, counts).exp()
    kept = (lowest <= geometric_mean) & (geometric_mean <= highest)
    return tis(log_ratio, counts, low, high).masked_fill(~spread(kept, counts, len(log_ratio)), 0)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float, float, Bounds | None], Tensor]] = {
    "tis": tis,
    "icepop": icepop,
    "seq-mask-tis": seq_mask_tis,
}
"""(log_ratio (A,), counts (B,), low, high, bounds of sequences) -> weights (A,)"""


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor) -> Metrics:
    """How far the sampler is from the policy, both (A,): of the same weights, these are numerical noise.

    `mismatch/kl` estimates KL(sampler || policy): the mean of r - 1 - log r with r = pi_prox / pi_behave.
    `mismatch/ess` is the effective sample size of the weights r, (sum r)^2 / (A sum r^2): 1 where all weigh
    the same, near 0 where few actions carry the update. `abs_diff_*` are of |log r|; p99 is exceeded by at
    most 1 % of the actions.
    """
    log_ratio = (log_probs - rollout_log_probs).clamp(-20, 20)
    distance = log_ratio.abs()
    return {
        "mismatch/kl": float(mean(log_ratio.exp() - 1 - log_ratio)),
        "mismatch/abs_diff_mean": float(mean(distance)),
        "mismatch/abs_diff_p99": _percentile(distance, 99),
        "mismatch/abs_diff_max": float(distance.max()) if len(distance) else 0.0,
        "mismatch/ess": _effective_share(log_ratio.double().exp()),
    }


def _percentile(x: Tensor, percent: int) -> float:
    """The smallest value that `percent` % of the values do not exceed, 0 of nothing."""
    # torch.quantile takes no more than 2^24 values
    return float(x.kthvalue(-(-len(x) * percent // 100)).values) if len(x) else 0.0


def _effective_share(weights: Tensor) -> float:
    """Effective sample size as a share of the samples, 1 of nothing."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())) if len(weights) else 1.0
