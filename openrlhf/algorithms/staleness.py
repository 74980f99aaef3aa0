"""Loss weights of actions by their staleness."""

from typing import Literal

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread


def staleness_weights(
    staleness: Tensor, counts: Tensor, decay: float, limit: int | None, ratio: Literal["token", "sequence"]
) -> Tensor:
    """(A,) int -> (A,): decay^staleness, and 0 where the staleness exceeds `limit`. Actions of weight 0 still
    count in the divisor of the loss, so that dropping them does not raise the step size.

    With sequence ratios, a sequence is weighted as a whole, since each action changes the ratio of all
    others. Its staleness is the mean over its actions, like its log ratio, so its decay is the geometric mean
    of the decays of its actions.
    """
    age = staleness.float()
    if ratio == "sequence":
        age = spread(segment_mean(age, counts), counts, len(age))
    weights = decay**age
    return weights if limit is None else weights.masked_fill(age > limit, 0)
