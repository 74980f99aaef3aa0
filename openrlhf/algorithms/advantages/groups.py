"""Statistics over groups, the samples of one prompt. `group_ids` (E,) has any integers, equal within a group;
the samples of a group need not be neighbours."""

from openrlhf.algorithms.tensor import Tensor


def group_sums(x: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(E,) -> the sum (E,) float64 and the size (E,) of each sample's group.

    Sums are float64, since rounding a float32 mean of equal rewards would leave differences that a division
    by their standard deviation magnifies.
    """
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    values = x.double()
    totals = values.new_zeros(len(sizes)).index_add(0, index, values)
    return totals[index], sizes[index]


def deviations(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(E,) -> (E,) float64: each reward minus its group's mean."""
    totals, sizes = group_sums(rewards, group_ids)
    return rewards - totals / sizes


def center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(E,) -> (E,): each reward minus its group's mean, 0 for a group of one."""
    return deviations(rewards, group_ids).to(rewards.dtype)


def group_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(E,) -> (E,) float64: the unbiased standard deviation of each sample's group, 0 for a group of one."""
    squares, sizes = group_sums(deviations(rewards, group_ids) ** 2, group_ids)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()


def without_peers(group_ids: Tensor) -> Tensor:
    """(E,) -> (E,) bool: samples of singleton groups, which have nothing to be compared with."""
    return group_sums(group_ids, group_ids)[1] == 1
