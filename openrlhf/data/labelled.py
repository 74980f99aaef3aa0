"""Tokenised samples with additional arrays of labels."""

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from openrlhf.data.store import SampleStore
from openrlhf.types import Image


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSamples:
    """A sample store with the arrays that a subclass adds as fields. Both together are its whole state, so it
    can be saved and memory-mapped."""

    samples: SampleStore

    @property
    def dropped(self) -> Counter[str]:
        """Reason -> number of rows that gave no item."""
        return self.samples.dropped

    @property
    def needed_len(self) -> int:
        """The smallest max_len with which no row is truncated or dropped for its length, see
        `SampleStore`."""
        return self.samples.needed_len

    @property
    def truncated(self) -> int:
        """Number of truncated samples, see `SampleStore`."""
        return self.samples.truncated

    @property
    def sequence_lengths(self) -> Sequence[int]:
        """Tokens of each sequence; an item may have several sequences."""
        return self.samples.lengths

    @property
    def images_digest(self) -> str:
        """Digest of the images, see `SampleStore`."""
        return self.samples.images_digest

    def sequences(self, i: int) -> tuple[np.ndarray, ...]:
        """See `SampleStore`."""
        return self.samples.sequences(i)

    def read_images_with(self, read: Callable[[int], tuple[Image, ...]], images_digest: str) -> None:
        """Sets the reader of images, as in `SampleStore`."""
        self.samples.read_images_with(read, images_digest)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the store and of the subclass, by name."""
        own = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), np.ndarray)}
        return self.samples.arrays() | own

    def meta(self) -> dict[str, Any]:
        return self.samples.meta()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Self:
        """Rebuilds the object from the results of `arrays` and `meta`; raises ValueError where they do not
        match."""
        own = {f.name: arrays[f.name] for f in fields(cls) if f.name in arrays}
        return cls(samples=SampleStore.from_arrays(arrays, meta), **own)


@dataclass(frozen=True, kw_only=True, eq=False)
class TwoSamples(LabelledSamples, ABC):
    """Items of two samples each: item i has samples 2i and 2i + 1."""

    ref_log_probs: np.ndarray | None = None
    """(items, 2) float32, summed log-probs of both samples under the reference model, where known."""

    def __post_init__(self) -> None:
        if self.ref_log_probs is not None and self.ref_log_probs.shape != (len(self), 2):
            raise ValueError(f"reference log-probs {self.ref_log_probs.shape} for {len(self)} items of two")

    def __len__(self) -> int:
        return len(self.samples) // 2

    @abstractmethod
    def __getitem__(self, i: int, /) -> Any: ...

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Total tokens of both samples of each item."""
        both = np.asarray(self.samples.lengths, dtype=np.int64).reshape(-1, 2).sum(1)
        return array("q", both.tobytes())

    def sequences(self, i: int) -> tuple[np.ndarray, ...]:
        """See `SampleStore`."""
        return self.samples.token_ids(2 * i), self.samples.token_ids(2 * i + 1)

    def with_reference(self, log_probs: np.ndarray) -> Self:
        """Returns a copy with reference log-probs. log_probs: (items, 2) summed log-probs under the reference
        model."""
        return replace(self, ref_log_probs=np.asarray(log_probs, dtype=np.float32))

    def ref_of(self, i: int) -> Tensor | None:
        """Returns the (2,) reference log-probs of item i, or None where they are unknown."""
        return None if self.ref_log_probs is None else torch.from_numpy(np.array(self.ref_log_probs[i]))
