"""Puts sequences of a batch that share a prefix into the same row and on the same rank."""

import weakref
from collections.abc import Sequence

import numpy as np

from openrlhf.data.packing import partition
from openrlhf.data.prefixes import Neighbours, Related, some_begin_alike
from openrlhf.types import Image


def rows_of_related(
    token_ids: np.ndarray, lengths: Sequence[int], *, max_tokens: int | None, max_sequences: int
) -> list[list[int]] | None:
    """Groups sequences into rows so that those with a common prefix share a row. Returns the indices of each
    row's sequences; None if sharing does not pay off.

    token_ids: (N,), the tokens of all sequences, one sequence behind the other.
    max_tokens: limit of a row. A common prefix counts once, its repetitions `REPEATED_TOKEN` a token. A
        longer sequence has a row of its own. None: rows have `max_sequences`.
    """
    related = Related.of(token_ids, lengths) if max_tokens is not None or max_sequences > 1 else None
    if related is None:
        return None
    return related.rows(range(len(lengths)), max_tokens=max_tokens, max_items=max_sequences)


def parts_of_related(
    token_ids: np.ndarray, lengths: Sequence[int], k: int, indices: Sequence[int] | None = None
) -> list[list[int]]:
    """Divides sequences into `k` parts with nearly equal numbers of tokens to compute. Returns the indices of
    each part's sequences. `token_ids`: see `rows_of_related`. `indices`: divides only these sequences, and
    returns indices of `indices`.

    Sequences with a common prefix share a part, unless the largest part would then have more tokens to
    compute than in a division by lengths alone."""
    chosen = lengths if indices is None else [lengths[i] for i in indices]
    related = None
    if k > 1 and len(chosen) > 1 and (neighbours := _compare(token_ids, lengths)) is not None:
        if indices is not None:
            neighbours = neighbours.select(np.asarray(indices), np.asarray(lengths))
        related = Related.of_neighbours(neighbours, chosen)
    return partition(chosen, k) if related is None else related.parts(k)


_last: tuple[weakref.ref[np.ndarray], np.ndarray, Neighbours | None] | None = None
"""The tokens that `_compare` compared last, the lengths of their sequences, and its result."""


def _compare(token_ids: np.ndarray, lengths: Sequence[int]) -> Neighbours | None:
    """Compares sequences; the tokens of a step, which all its models and schedules divide, only once. Returns
    None if no two begin alike."""
    global _last
    cells, sizes = token_ids[:, None], np.asarray(lengths)
    if _last is None or _last[0]() is not token_ids or not np.array_equal(_last[1], sizes):
        found = Neighbours.of(cells, sizes) if some_begin_alike(cells, sizes) else None
        _last = weakref.ref(token_ids), sizes, found
    return _last[2]


def identities(
    token_ids: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    *,
    images: Sequence[tuple[Image, ...]] = (),
    routing: np.ndarray | None = None,
) -> np.ndarray:
    """Returns one number for each token, (N,), for the comparison of sequences; `token_ids` itself if there
    are neither images nor routing. Tokens have different numbers if they differ, if their sequences have
    different images, or if they are routed to different experts.

    token_ids: (N,), see `rows_of_related`.
    images: images of each sequence; empty if there are none.
    routing: (N, M, K) experts of each token, see `Trajectory.routing`.
    """
    if not images and routing is None:
        return token_ids
    numbers = token_ids.astype(np.int64)
    if images:
        known: dict[tuple[bytes, ...], int] = {}
        of_sequences = [known.setdefault(tuple(x.data for x in own), len(known)) for own in images]
        numbers += np.repeat(np.array(of_sequences), lengths) << 32
    if routing is not None:
        experts = routing.reshape(len(numbers), -1)
        factors = np.random.default_rng(0).integers(1 << 62, size=experts.shape[1]) | 1
        for column, factor in zip(experts.T, factors, strict=True):
            # The sum is modulo 2^64. Different experts have the same sum with a probability of about 2^-62.
            numbers += column.astype(np.int64) * factor
    return numbers
