"""Statistics over groups, the samples of one prompt. `group_ids` (E,) are integers, equal within a group; the
samples of a group need not be adjacent."""

from openrlhf.algorithms.tensor import Tensor


def group_sums(x: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of `x` (E,) over each sample's group, (E,) float64, and the group's size, (E,).

    Sums are float64: the float32 mean of equal rewards may differ from them by a rounding error, which a
    division by the standard deviation would magnify.
    """
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    values = x.double()
    totals = values.new_zeros(len(sizes)).index_add(0, index, values)
    return totals[index], sizes[index]


def deviations(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns each reward (E,) minus its group's mean, (E,) float64."""
    totals, sizes = group_sums(rewards, group_ids)
    return rewards - totals / sizes


def center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns each reward (E,) minus its group's mean, (E,) in the dtype of `rewards`; 0 in a singleton
    group."""
    return deviations(rewards, group_ids).to(rewards.dtype)


def group_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the unbiased standard deviation of each sample's group, (E,) float64; 0 for a singleton
    group."""
    squares, sizes = group_sums(deviations(rewards, group_ids) ** 2, group_ids)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()


def is_singleton(group_ids: Tensor) -> Tensor:
    """Returns (E,) bool, True for the sample of a singleton group."""
    return group_sums(group_ids, group_ids)[1] == 1
