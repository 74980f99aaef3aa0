"""Common prefixes of a row's sequences: the samples of a prompt, the two answers of a preference pair, the
turns of an episode.

A causal model computes the same hidden states for tokens that sequences have in common from their beginning.
So it reads the tree of the row's prefixes: every token that differs, or follows a difference, once. All
layers except attention compute every token by itself. In attention a sequence's own tokens are the last
queries of longer keys, and the keys and values of what it shares are repeated by an index, whose backward
pass sums their gradients in float32 or wider. An index also expands the tree's hidden states to the row.

The repeated keys and values take the memory that those of the row take without sharing; everything else
shrinks with the number of tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.data.prefixes import FEWEST_TOKENS, SMALLEST_FRACTION, Neighbours, some_begin_alike
from openrlhf.models.sequence_parallel import Packing
from openrlhf.types import PackedRow, present


class PrefixTree(NamedTuple):
    """The tree of the common prefixes of a row of N tokens; M tokens, in the order of the row."""

    places: np.ndarray  # (M,) the row's token that each of the tree's is
    index: np.ndarray  # (N,) the tree's token for each of the row's
    own: np.ndarray  # (B,) number of tokens at the end of each sequence that no earlier sequence has

    def of_row(self, row: PackedRow) -> PackedRow:
        """Returns the row of the tree's tokens: each sequence's own, if it has any. Actions are those of the
        whole row."""
        places = torch.from_numpy(self.places).to(row.token_ids.device, non_blocking=True)
        routing = row.routing
        return PackedRow(
            token_ids=row.token_ids[places],
            position_ids=row.position_ids[places],
            action_mask=row.action_mask[places],
            actions=row.actions,
            lengths=tuple(self.own[self.own > 0].tolist()),
            routing=None if routing is None else routing[places],
        )


class Branches(NamedTuple):
    """The keys of a tree's queries. It travels through the model to the attention inside `Packing`."""

    keys: Packing
    """The keys of each sequence with tokens of its own: all its tokens."""
    places: Tensor  # (K,) the tree's token of each key
    runs: list[tuple[int, int, int]]
    """`places` as runs of consecutive tokens: (first token of the tree, first key, number)."""
    of_row: Tensor  # (N,) the tree's token for each of the row's, for what is counted over the row

    @classmethod
    def of(cls, tree: PrefixTree, lengths: Sequence[int], num_more: int, device: torch.device) -> Self:
        """Returns the branches of `tree`. `lengths`: of the row's sequences. `num_more`: tokens of a sequence
        after the tree's."""
        has_own = tree.own > 0
        index = tree.index[np.repeat(has_own, lengths)]
        places = np.concatenate([index, len(tree.places) + np.arange(num_more)])
        of_keys = [*np.asarray(lengths)[has_own].tolist(), *([num_more] if num_more else [])]
        starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        on_device = lambda x: torch.from_numpy(x).to(device, non_blocking=True)
        return cls(
            keys=Packing.of(of_keys, device),
            places=on_device(places),
            runs=[(int(places[start]), start, end - start) for start, end in pairwise(starts)],
            of_row=on_device(tree.index),
        )

    def repeated(self, x: Tensor) -> Tensor:
        """Returns the keys or values (1, heads, K, d) of all branches from those of the tree's tokens (1,
        heads, M, d)."""
        return _Repeated.apply(x, self)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: Branches) -> Tensor:
        ctx.branches, ctx.shape = branches, x.shape
        return x.index_select(2, branches.places)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        if grad.is_cuda:
            total.index_add_(2, ctx.branches.places, grad.to(total.dtype))
        else:  # one addition for each token otherwise
            for source, target, length in ctx.branches.runs:
                total.narrow(2, source, length).add_(grad.narrow(2, target, length))
        return total.to(grad.dtype), None


def tree_of(row: PackedRow, *, with_routing: bool) -> PrefixTree | None:
    """Returns the tree of the row's prefixes, None where sharing does not pay. `with_routing`: tokens must
    also have been routed to the same experts."""
    row = row.host or row
    cells = row.token_ids.cpu().numpy()[:, None]
    if with_routing:
        routing = present(row.routing).cpu().numpy()
        cells = np.concatenate([cells, routing.reshape(len(routing), -1)], axis=1)
    return prefix_tree(cells, row.lengths)


def prefix_tree(cells: np.ndarray, lengths: Sequence[int]) -> PrefixTree | None:
    """Returns the tree of the common prefixes of sequences of these lengths, None where sharing does not pay.

    cells: (N, c), the tokens of all sequences end to end. Two tokens are the same where all their numbers
        are.
    """
    sizes = np.asarray(lengths)
    starts = sizes.cumsum() - sizes
    if not some_begin_alike(cells, sizes):
        return None
    shared, source = _nearest_earlier(*Neighbours.of(cells, sizes))
    if shared.sum() < SMALLEST_FRACTION * len(cells):
        return None
    is_own = np.arange(len(cells)) - np.repeat(starts, sizes) >= np.repeat(shared, sizes)
    index = is_own.cumsum() - 1
    for j in np.flatnonzero(shared):
        i, begin, length = source[j], starts[j], shared[j]
        index[begin : begin + length] = index[starts[i] : starts[i] + length]
    return PrefixTree(np.flatnonzero(is_own), index, sizes - shared)


def _nearest_earlier(order: np.ndarray, common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens each sequence shares with an earlier one of the row, and with which.

    Sequences leave the sorted list from the last to the first. The neighbours of the one that leaves are
    earlier in the row, and one of them shares most with it.
    """
    count = len(order)
    rank = order.argsort()
    before, after = [*range(-1, count - 1)], [*range(1, count + 1)]
    to_next = [*common.tolist(), 0]  # tokens in common with the next that is left
    shared, source = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for j in range(count - 1, 0, -1):
        place = int(rank[j])
        left, right = before[place], after[place]
        with_left = to_next[left] if left >= 0 else 0
        with_right = to_next[place] if right < count else 0
        most, of = max((with_left, left), (with_right, right))
        if most >= FEWEST_TOKENS:
            shared[j], source[j] = most, order[of]
        if left >= 0:
            after[left], to_next[left] = right, min(with_left, with_right)
        if right < count:
            before[right] = left
    return shared, source
