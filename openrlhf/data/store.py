"""Tokenised samples in compact flat arrays, with arrays of labels."""

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.data.growing import GrowingArray
from openrlhf.rows import Sample
from openrlhf.types import Image

ItemT = TypeVar("ItemT")

Tokens = tuple[list[int], list[bool]]
"""(token ids, True where the token is learned), of equal length."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The reason why a row gives no sample."""

    reason: str
    needed_len: int = 0
    """The max_len with which the whole row would be a sample. 0: no max_len helps."""


class Samples(ABC, Generic[ItemT]):
    """Items of one or more samples each, in flat arrays: 5 bytes for each token, memory-mapped where they are
    many. Its arrays and its counts are its whole state, so it can be saved and memory-mapped."""

    ITEM_SAMPLES: ClassVar = 1
    """Number of samples of an item: item i has those from number ITEM_SAMPLES * i on."""
    LABELS: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that are arrays of labels."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        """Reason -> number of rows that gave no item."""
        self.needed_len = 0
        """The smallest max_len with which no row is truncated or skipped for its length. 0: none is."""
        self.truncated = 0
        """Number of rows truncated at max_len."""
        self.sequence_lengths: array[int] = array("q")
        """Tokens of each sample."""
        self._growing = {
            "token_ids": GrowingArray("i"),
            "action_mask": GrowingArray("b"),
            "rows": GrowingArray("q"),
        }
        self._arrays: dict[str, np.ndarray] = {}
        """The arrays once samples are read; then none can be appended."""
        self._read_images: Callable[[int], tuple[Image, ...]] | None = None
        self.images_digest = ""
        """Digest that changes when an image does. Empty: there are no images."""

    @abstractmethod
    def item(self, i: int) -> ItemT:
        """Returns item i, counted from 0."""

    def __len__(self) -> int:
        return len(self.sequence_lengths) // self.ITEM_SAMPLES

    def __getitem__(self, i: int) -> ItemT:
        return self.item(range(len(self))[i])

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Total tokens of the samples of each item. Read once all are appended."""
        of_items = np.asarray(self.sequence_lengths, dtype=np.int64).reshape(-1, self.ITEM_SAMPLES).sum(1)
        return array("q", of_items.tobytes())

    def sample(self, number: int) -> Sample:
        arrays, place = self._complete(), self._place(number)
        return Sample(
            token_ids=torch.from_numpy(np.array(arrays["token_ids"][place], dtype=np.int64)),
            action_mask=torch.from_numpy(np.array(arrays["action_mask"][place], dtype=np.bool_)),
            images=self._read_images(int(arrays["rows"][number])) if self._read_images else (),
        )

    def token_ids(self, number: int) -> np.ndarray:
        """Returns the token ids (L,) of a sample, without a copy."""
        return self._complete()["token_ids"][self._place(number)]

    def _place(self, number: int) -> slice:
        starts = self._complete()["starts"]
        return slice(starts[number], starts[number + 1])

    def sequences(self, i: int) -> tuple[np.ndarray, ...]:
        """Returns the token ids of each sequence of item i. Sequences that begin with the same numbers may be
        read once where they are in one row."""
        return tuple(self.token_ids(self.ITEM_SAMPLES * i + n) for n in range(self.ITEM_SAMPLES))

    def read_images_with(self, read: Callable[[int], tuple[Image, ...]], images_digest: str) -> None:
        """Makes samples carry the images that `read` returns for their row number, read anew on each access.
        Requires samples appended with their rows."""
        self._read_images, self.images_digest = read, images_digest

    def skip(self, skip: Skip, length: int = 0) -> None:
        """Counts a row without an item. length: its longest text, in tokens."""
        self.skipped[skip.reason] += 1
        if skip.needed_len:
            self.needed_len = max(self.needed_len, skip.needed_len, length)

    def truncate(self, length: int) -> None:
        """Counts a row whose longest text had `length` tokens, more than max_len."""
        self.truncated += 1
        self.needed_len = max(self.needed_len, length)

    def append(self, token_ids: Sequence[int], action_mask: Sequence[bool], row: int | None = None) -> None:
        """Appends a sample; allowed only before the first read. row: number of the row with the sample's
        images."""
        self._growing["token_ids"].extend(token_ids)
        self._growing["action_mask"].extend(action_mask)
        self._growing["rows"].extend(() if row is None else (row,))
        self.sequence_lengths.append(len(token_ids))

    def with_labels(self, **labels: np.ndarray) -> Self:
        """Returns a copy with these arrays of labels. Raises ValueError where they do not match the
        samples."""
        labelled = copy(self)
        vars(labelled).update(labels)
        labelled.check_labels()
        return labelled

    def check_labels(self) -> None:
        """Raises ValueError where the labels do not match the samples."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns token_ids (T,) int32 and action_mask (T,) int8 of all samples end to end; starts (samples +
        1,) int64, the start of each; with images rows (samples,) int64; and the labels."""
        arrays = {name: array for name, array in self._complete().items() if name != "rows" or len(array)}
        return arrays | {name: array for name in self.LABELS if (array := getattr(self, name)) is not None}

    def _complete(self) -> dict[str, np.ndarray]:
        """Returns all arrays but the labels; ends appending."""
        if self._growing:
            self._arrays = {name: growing.whole() for name, growing in self._growing.items()}
            self._arrays["starts"] = np.insert(np.cumsum(self.sequence_lengths, dtype=np.int64), 0, 0)
            self._growing = {}
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        self._complete()
        return self.__dict__

    def meta(self) -> dict[str, Any]:
        return {
            "dropped": dict(self.skipped),
            "needed_len": self.needed_len,
            "truncated": self.truncated,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Self:
        """Rebuilds the object from the results of `arrays` and `meta`; raises ValueError where they do not
        match."""
        store = cls()
        columns = {"rows": np.empty(0, np.int64)} | dict(arrays)
        names = ("token_ids", "action_mask", "starts", "rows")
        store._growing, store._arrays = {}, {name: np.asarray(columns[name]) for name in names}
        token_ids, action_mask, starts, _ = store._arrays.values()
        if not len(token_ids) == len(action_mask) == starts[-1]:
            raise ValueError("the arrays have different lengths")
        store.sequence_lengths = array("q", np.diff(starts).astype(np.int64).tobytes())
        store.skipped = Counter(meta["dropped"])
        store.needed_len = meta["needed_len"]
        store.truncated = meta["truncated"]
        needed = [name for name in cls.LABELS if name in arrays or not hasattr(cls, name)]
        return store.with_labels(**{name: arrays[name] for name in needed})


class SampleStore(Samples[Sample]):
    """Items of one sample each."""

    def item(self, i: int) -> Sample:
        return self.sample(i)


class TwoSamples(Samples[ItemT]):
    """Items of two samples each."""

    ITEM_SAMPLES = 2

    ref_log_probs: np.ndarray | None = None
    """(items, 2) float32, summed log-probs of both samples under the reference model, where known."""

    def check_labels(self) -> None:
        for name in self.LABELS:
            labels, count = getattr(self, name), len(self.sequence_lengths)
            if labels is not None and 2 * len(labels) != count:
                raise ValueError(f"{count} samples for {len(labels)} {name}, one for each two")

    def with_reference(self, log_probs: np.ndarray) -> Self:
        """Returns a copy with reference log-probs. log_probs: (items, 2) summed log-probs under the reference
        model."""
        return self.with_labels(ref_log_probs=np.asarray(log_probs, dtype=np.float32))

    def read_ref(self, i: int) -> Tensor | None:
        """Returns the (2,) reference log-probs of item i, or None where they are unknown."""
        return None if self.ref_log_probs is None else torch.from_numpy(np.array(self.ref_log_probs[i]))
