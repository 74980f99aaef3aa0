"""The order in which an epoch visits a dataset."""

import random


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Returns a permutation of range(size), the same on every machine for the same seed and epoch."""
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
