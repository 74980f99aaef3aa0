"""Loss weights of actions by their staleness."""

from typing import Literal

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread


def staleness_weights(
    staleness: Tensor, counts: Tensor, decay: float, limit: int | None, ratio: Literal["token", "sequence"]
) -> Tensor:
    """Returns the weights decay^staleness of `staleness` (A,) int; 0 where the staleness exceeds `limit`. The
    divisor of the loss still counts actions of weight 0, so that dropping them does not raise the step size.

    If the policy loss has one ratio per sequence, all actions of a sequence get the same weight, because each
    action changes the ratio of all others. The staleness of a sequence is the mean over its actions, like its
    log ratio, so its weight is the geometric mean of its actions' weights.
    """
    age = staleness.float()
    if ratio == "sequence":
        age = spread(segment_mean(age, counts), counts, len(age))
    weights = decay**age
    return weights if limit is None else weights.masked_fill(age > limit, 0)
