"""Chooses the few samples of a step, or points of a curve, that are kept or shown."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def best_to_worst(rewards: Sequence[float | None], limit: int, *, failed: int = 0) -> list[int]:
    """Returns the indices of at most `limit` samples: evenly spaced from the best reward to the worst, then
    failed ones, whose reward is None, if there is room. `failed`: places that are kept for failed samples."""
    scored = sorted((i for i, r in enumerate(rewards) if r is not None), key=lambda i: -(rewards[i] or 0.0))
    without = [i for i, r in enumerate(rewards) if r is None]
    chosen = evenly(scored, limit - min(failed, len(without)))
    return chosen + without[: limit - len(chosen)]


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` items, evenly spaced, with the first and the last one."""
    if count >= len(items):
        return list(items)
    if count == 1:
        return list(items[:1])
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def thinned(curve: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Reduces a curve to at most `most` points: the first, the last, and the lowest and the highest one of
    each of equally long stretches, so that spikes stay."""
    if len(curve) <= most:
        return curve
    width, height = -(-len(curve) // (most // 2 - 1)), lambda point: point[1]
    stretches = [curve[start : start + width] for start in range(0, len(curve), width)]
    extremes = (pick(stretch, key=height) for stretch in stretches for pick in (min, max))
    return sorted({curve[0], curve[-1], *extremes})
