"""Weights of actions by the age of the weights that chose them."""

from typing import Literal

from torch import Tensor

from openrlhf.algorithms.reductions import segment_mean, spread


def staleness_weights(
    staleness: Tensor, counts: Tensor, decay: float, limit: int | None, ratio: Literal["token", "sequence"]
) -> Tensor:
    """(A,) int -> (A,): decay^staleness, and 0 where the staleness is more than `limit`. A weight of 0 still
    counts in the divisor of the loss: dropping must not raise the step size.

    Where the ratio is of sequences, every action moves all others of its sequence, and a sequence is weighted
    as a whole: its staleness is the mean over its actions, as its log ratio is. So its decay is the geometric
    mean of theirs.
    """
    age = staleness.float()
    if ratio == "sequence":
        age = spread(segment_mean(age, counts), counts, len(age))
    weights = decay**age
    return weights if limit is None else weights.masked_fill(age > limit, 0)
