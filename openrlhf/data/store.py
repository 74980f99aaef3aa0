"""Tokenised samples in compact flat arrays."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from openrlhf.data.growing import GrowingArray
from openrlhf.types import Image, Sample


@dataclass(frozen=True, slots=True)
class Drop:
    """The reason why a row gives no sample."""

    reason: str
    needed_len: int = 0
    """The max_len with which the whole row would be a sample. 0: no max_len helps."""


class Kept(Protocol):
    """Samples built from rows, with counts of the rows that were truncated or dropped: see `SampleStore`."""

    @property
    def dropped(self) -> Counter[str]: ...

    @property
    def truncated(self) -> int: ...

    @property
    def needed_len(self) -> int: ...

    def __len__(self) -> int: ...


class SampleStore:
    """Samples in flat arrays: 5 bytes for each token, memory-mapped where they are many."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        """Reason -> number of rows that gave no sample."""
        self.needed_len = 0
        """The smallest max_len with which no row is truncated or dropped for its length. 0: none is."""
        self.truncated = 0
        """Number of rows truncated at max_len."""
        self.lengths: Sequence[int] = array("q")
        """Tokens of each sample."""
        self._token_ids: GrowingArray | np.ndarray = GrowingArray("i")
        self._action_mask: GrowingArray | np.ndarray = GrowingArray("b")
        self._starts: array[int] | np.ndarray = array("q", [0])
        self._rows: array[int] | np.ndarray = array("q")
        self._read_images: Callable[[int], tuple[Image, ...]] | None = None
        self.images_digest = ""
        """Digest that changes when an image does. Empty: there are no images."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Sample:
        i = range(len(self))[i]
        start, stop = self._starts[i], self._starts[i + 1]
        token_ids, action_mask = self._complete()
        return Sample(
            token_ids=torch.from_numpy(np.array(token_ids[start:stop], dtype=np.int64)),
            action_mask=torch.from_numpy(np.array(action_mask[start:stop], dtype=np.bool_)),
            images=self._read_images(int(self._rows[i])) if self._read_images else (),
        )

    def token_ids(self, i: int) -> np.ndarray:
        """Returns the token ids (L,) of sample i, without a copy."""
        return self._complete()[0][self._starts[i] : self._starts[i + 1]]

    def sequences(self, i: int) -> tuple[np.ndarray, ...]:
        """Returns the token ids of each sequence of item i. Sequences that begin with the same numbers may be
        read once where they are in one row."""
        return (self.token_ids(i),)

    def read_images_with(self, read: Callable[[int], tuple[Image, ...]], images_digest: str) -> None:
        """Makes samples carry the images that `read` returns for their row number, read anew on each access.
        Requires samples appended with their rows."""
        self._read_images, self.images_digest = read, images_digest

    @property
    def sequence_lengths(self) -> Sequence[int]:
        """Lengths of the sequences, see `LabelledSamples`."""
        return self.lengths

    def drop(self, drop: Drop) -> None:
        self.dropped[drop.reason] += 1
        self.needed_len = max(self.needed_len, drop.needed_len)

    def cut(self, length: int) -> None:
        """Counts a sample that had `length` tokens, more than max_len."""
        self.truncated += 1
        self.needed_len = max(self.needed_len, length)

    def append(self, token_ids: Sequence[int], action_mask: Sequence[bool], row: int | None = None) -> None:
        """Appends a sample; allowed only before the first read. row: number of the row with the sample's
        images."""
        assert isinstance(self._token_ids, GrowingArray) and isinstance(self._action_mask, GrowingArray)
        assert isinstance(self._starts, array) and isinstance(self.lengths, array)
        assert isinstance(self._rows, array)
        self._token_ids.extend(token_ids)
        self._action_mask.extend(action_mask)
        self._starts.append(len(self._token_ids))
        self.lengths.append(len(token_ids))
        if row is not None:
            self._rows.append(row)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns token_ids (T,) int32 and action_mask (T,) int8 of all samples end to end; starts (samples +
        1,) int64, the start of each; with images rows (samples,) int64."""
        token_ids, action_mask = self._complete()
        arrays = {
            "token_ids": token_ids,
            "action_mask": action_mask,
            "starts": np.asarray(self._starts),
        }
        return arrays | ({"rows": np.asarray(self._rows)} if len(self._rows) else {})

    def _complete(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids and action mask as arrays; ends appending."""
        if isinstance(self._token_ids, GrowingArray):
            self._token_ids = self._token_ids.whole()
        if isinstance(self._action_mask, GrowingArray):
            self._action_mask = self._action_mask.whole()
        return self._token_ids, self._action_mask

    def __getstate__(self) -> dict[str, Any]:
        self._complete()
        return self.__dict__

    def meta(self) -> dict[str, Any]:
        return {
            "dropped": dict(self.dropped),
            "needed_len": self.needed_len,
            "truncated": self.truncated,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Self:
        """Rebuilds the store from the results of `arrays` and `meta`; raises ValueError where they do not
        match."""
        store = cls()
        store._token_ids, store._action_mask, store._starts = (
            np.asarray(arrays[name]) for name in ("token_ids", "action_mask", "starts")
        )
        store._rows = np.asarray(arrays.get("rows", ()), dtype=np.int64)
        if not len(store._token_ids) == len(store._action_mask) == store._starts[-1]:
            raise ValueError("the arrays have different lengths")
        store.lengths = array("q", np.diff(store._starts).astype(np.int64).tobytes())
        store.dropped = Counter(meta["dropped"])
        store.needed_len = meta["needed_len"]
        store.truncated = meta["truncated"]
        return store
