"""Off-policy correction: for a sampler that is not quite the policy, by its kernels, precision or staleness.

Three policies: pi (being trained), pi_behave (the sampler) and pi_prox (from which the clip counts). The loss
clips pi / pi_prox; a correction multiplies it by a function of pi_prox / pi_behave, through which no gradient
flows: decoupled PPO, https://arxiv.org/abs/2110.00641. `log_ratio` (A,) is log(pi_prox / pi_behave),
of tokens or of sequences, as `policy_loss` computes it: clamped, so that no weight is infinite. Staleness
weighs an action by nothing but the age of the weights that chose it. A weight of 0 still counts in the
divisor of the loss: dropping must not raise the step size.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread

Bounds = tuple[float, float]


def recomputed(
    log_probs: Tensor, old_log_probs: Tensor | None, rollout_log_probs: Tensor, staleness: Tensor | None
) -> Tensor:
    """The policy before the step's update, which in a step of one update is the policy itself.
    AReaL, https://arxiv.org/abs/2505.24298"""
    return log_probs if old_log_probs is None else old_log_probs


def rollout(
    log_probs: Tensor, old_log_probs: Tensor | None, rollout_log_probs: Tensor, staleness: Tensor | None
) -> Tensor:
    """The sampler: the ratio is the importance weight, as in PPO as it was written."""
    return rollout_log_probs


def interpolated(
    log_probs: Tensor, old_log_probs: Tensor | None, rollout_log_probs: Tensor, staleness: Tensor | None
) -> Tensor:
    """log pi_prox = alpha log pi_behave + (1 - alpha) log pi, alpha = 1 / max(staleness, 1)

    So pi / pi_prox is (pi / pi_behave)^alpha, and up to staleness 1 pi_prox is the sampler. The staleness is
    that at the start of the step. A-3PO, https://arxiv.org/abs/2512.06547
    """
    if staleness is None:
        return rollout_log_probs
    of_policy = 1 - 1 / staleness.clamp(min=1)
    return rollout_log_probs + of_policy * (log_probs - rollout_log_probs)


PROXIMAL_POLICIES: dict[str, Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]] = {
    "recomputed": recomputed,
    "rollout": rollout,
    "interpolated": interpolated,
}
"""(log pi without a gradient, of the policy before the update, log pi_behave, staleness) -> log pi_prox,
all (A,). Without a staleness it is 0."""


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


def staleness_weights(
    staleness: Tensor, counts: Tensor, decay: float, limit: int | None, ratio: Literal["token", "sequence"]
) -> Tensor:
    """(A,) int -> (A,): decay^staleness, and 0 where the staleness is more than `limit`.

    Where the ratio is of sequences, every action moves all others of its sequence, and a sequence is weighted
    as a whole: its staleness is the mean over its actions, as its log ratio is. So its decay is the geometric
    mean of theirs.
    """
    age = staleness.float()
    if ratio == "sequence":
        age = spread(segment_mean(age, counts), counts, len(age))
    weights = decay**age
    return weights if limit is None else weights.masked_fill(age > limit, 0)
