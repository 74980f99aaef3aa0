"""Computes common prefixes of a row's sequences once: of the samples of a prompt, of the two answers of a
preference pair, of the turns of an episode.

A causal model computes equal hidden states for the tokens of a common prefix. So it gets the prefix tree of
the row instead of the row: each shared token occurs in it once. All layers except attention treat tokens
independently. In attention, the queries are a sequence's own tokens, and the keys are all its tokens;
`Branches.repeated` gathers keys and values of shared tokens by an index, whose backward pass sums gradients
in float32 or wider. Another index expands the tree's hidden states to the row.

The repeated keys and values take as much memory as without sharing; everything else shrinks with the number
of tokens. They are held for the backward pass: computing each layer's attention again would save little of
what sharing leaves, and gradient checkpointing does it for all of a layer.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.data.prefixes import FEWEST_TOKENS, SMALLEST_FRACTION, Neighbours, some_begin_alike
from openrlhf.models.packing import Packing
from openrlhf.rows import PackedRow
from openrlhf.types import Image, not_none


class PrefixTree(NamedTuple):
    """The prefix tree of a row of N tokens: M tokens, in the order of the row."""

    places: np.ndarray  # (M,) index in the row of each token of the tree
    index: np.ndarray  # (N,) index in the tree of each token of the row
    own: np.ndarray  # (B,) number of tokens of each sequence that it shares with no earlier one
    images: tuple[tuple[Image, ...], ...] = ()
    """Images whose patches are among each sequence's own tokens; empty if the row has none."""

    def of_row(self, row: PackedRow) -> PackedRow:
        """Returns a row of the tree's tokens: its sequences are the own tokens of the row's sequences that
        have any. Its `actions` are those of the whole row."""
        places = torch.from_numpy(self.places).to(row.token_ids.device, non_blocking=True)
        routing = row.routing
        return PackedRow(
            token_ids=row.token_ids[places],
            position_ids=row.position_ids[places],
            action_mask=row.action_mask[places],
            actions=row.actions,
            lengths=tuple(self.own[self.own > 0].tolist()),
            images=tuple(of for of, own in zip(self.images, self.own, strict=False) if own > 0),
            routing=None if routing is None else routing[places],
        )

    def longer(self, num_tokens: int, images: tuple[Image, ...]) -> Self:
        """Returns the tree of the row with one more sequence, the only one with images, which has nothing in
        common with the others."""
        return type(self)(
            places=np.concatenate([self.places, len(self.index) + np.arange(num_tokens)]),
            index=np.concatenate([self.index, len(self.places) + np.arange(num_tokens)]),
            own=np.concatenate([self.own, [num_tokens]]),
            images=((),) * len(self.own) + (images,),
        )


class Branches(NamedTuple):
    """The keys that each query of a tree attends to. `RowPacking` carries them to the attention layers."""

    keys: Packing
    """The packing of the K keys: all tokens of each sequence that has own ones."""
    places: Tensor  # (K,) index in the tree of each key's token
    runs: list[tuple[int, int, int]]
    """`places` as runs of consecutive tokens: (index in the tree, index of the key, length)."""
    of_row: Tensor  # (N,) index in the tree of each token of the row, for statistics over the row

    @classmethod
    def of(cls, tree: PrefixTree, lengths: Sequence[int], num_more: int, device: torch.device) -> Self:
        """Returns the branches of `tree`. `lengths`: lengths of the row's sequences. `num_more`: length of
        one more sequence that follows the tree's tokens, such as padding; 0 if there is none."""
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
        """Maps keys or values of the tree's tokens, (1, heads, M, d), to those of all branches, (1, heads, K,
        d)."""
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
        else:  # index_add_ on a CPU adds token by token
            for source, target, length in ctx.branches.runs:
                total.narrow(2, source, length).add_(grad.narrow(2, target, length))
        return total.to(grad.dtype), None


def build_tree(row: PackedRow, *, with_routing: bool, patch_id: int | None = None) -> PrefixTree | None:
    """Returns the prefix tree of a row; None if sharing does not pay off. `with_routing`: shared tokens must
    also be routed to the same experts. `patch_id`: id of the token that represents a patch of an image."""
    row = row.host or row
    if row.images:
        return _tree_with_images(row, patch_id)
    cells = row.token_ids.cpu().numpy()[:, None]
    if with_routing:
        routing = not_none(row.routing).cpu().numpy()
        cells = np.concatenate([cells, routing.reshape(len(routing), -1)], axis=1)
    return prefix_tree(cells, row.lengths)


def _tree_with_images(row: PackedRow, patch_id: int | None) -> PrefixTree | None:
    """Returns the prefix tree of a row with images. Patches of different images are different tokens there.
    None also if the patches of an image are not consecutive, or follow those of another image directly."""
    token_ids, sizes = row.token_ids.cpu().numpy(), np.asarray(row.lengths)
    starts = sizes.cumsum() - sizes
    is_patch = token_ids == patch_id
    is_first = is_patch & ~np.concatenate([[False], is_patch[:-1]])
    is_first[starts] = is_patch[starts]
    if np.add.reduceat(is_first.astype(int), starts).tolist() != [len(images) for images in row.images]:
        return None
    known: dict[bytes, int] = {}
    numbers = [known.setdefault(image.data, len(known) + 1) for images in row.images for image in images]
    of_token = np.where(is_patch, np.array(numbers)[is_first.cumsum() - 1], 0)
    tree = prefix_tree(np.stack([token_ids, of_token], axis=1), row.lengths)
    if tree is None:
        return None
    is_own = iter(np.isin(np.flatnonzero(is_first), tree.places).tolist())
    return tree._replace(
        images=tuple(tuple(image for image in images if next(is_own)) for images in row.images)
    )


def prefix_tree(cells: np.ndarray, lengths: Sequence[int]) -> PrefixTree | None:
    """Returns the prefix tree of sequences of these lengths; None if sharing does not pay off.

    cells: (N, c), the tokens of all sequences, one sequence behind the other. Two tokens are equal if all
        their c numbers are.
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
    """Returns, for each sequence, the largest number of tokens that it shares with an earlier sequence of the
    row, and the index of that sequence.

    Sequences are removed from the sorted list in reverse order of the row. When one is removed, all that are
    left are earlier in the row, and one of its neighbours shares the most tokens with it.
    """
    count = len(order)
    rank = order.argsort()
    before, after = [*range(-1, count - 1)], [*range(1, count + 1)]
    to_next = [*common.tolist(), 0]  # length of the common prefix with the next one that is left
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
