"""The weights that a trainer sends: metadata, and the unsharded tensors."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from openrlhf.backends.base import Part
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.backends.weight_sync.buckets import Bucket, TensorMeta, plan_buckets
from openrlhf.backends.weight_sync.checksum import Checksum
from openrlhf.config.choices import LoraSync

GATHERED_BYTES = 64 << 20
"""Bytes of weights that are gathered at a time."""
ADAPTER_MARKS = (".lora_A.", ".lora_B.")
"""Substrings of the names of an adapter's tensors. No other weights have them."""


class WeightSource:
    """A model's weights as the transports read them: metadata, and a collective iteration over the tensors.
    With separate adapters, base weights are sent only the first time."""

    def __init__(self, engine: TrainedRank, lora_sync: LoraSync) -> None:
        self.engine = engine
        self.whole_part: Part = "merged" if lora_sync == "merged" else "base"
        """Part of the model that the engines' layers store."""
        self.parts: tuple[Part, ...] = ("merged",) if lora_sync == "merged" else ("base", "adapter")
        self.checksum = Checksum()
        self._metadata: dict[Part, list[TensorMeta]] = {}

    @property
    def tensors(self) -> list[TensorMeta]:
        """Metadata of the tensors that the next sync sends."""
        return [meta for part in self.parts for meta in self._of_part(part)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.checksum = Checksum()
        for part in self.parts:
            for name, tensor in self.engine.weights(GATHERED_BYTES, part):
                whole = tensor.contiguous()
                self.checksum.add(name, whole)
                yield name, whole

    def mark_sent(self) -> None:
        """Limits further syncs to the part that training changes: all weights, or the adapter."""
        self.parts = self.parts[-1:]

    def _of_part(self, part: Part) -> list[TensorMeta]:
        if part not in self._metadata:
            found = self.engine.weight_metadata(part)
            self._metadata[part] = [TensorMeta(n, str(dtype)[6:], shape) for n, dtype, shape in found]
        return self._metadata[part]


def filled_buckets(
    source: WeightSource, capacity: int, memory: Tensor | None = None
) -> Iterator[tuple[Bucket, Tensor]]:
    """Yields all weights of `source` as (bucket, buffer). There are two buffers, so a buffer is overwritten
    by the second bucket after it.

    `memory`: the two buffers, (2, bytes) uint8; None: new memory."""
    stream, buckets = iter(source), plan_buckets(source.tensors, capacity)
    if memory is None:
        memory = torch.empty(2, max((b.num_bytes for b in buckets), default=0), dtype=torch.uint8)
    for bucket, buffer in zip(buckets, buffers(memory, buckets), strict=True):
        for meta, view in bucket.views(buffer):
            name, tensor = next(stream)
            assert name == meta.name, (name, meta.name)
            view.copy_(tensor)
        yield bucket, buffer
    for _ in stream:  # ends the last gather
        raise AssertionError("more weights than the metadata announced")


def buffers(memory: Tensor, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
    """Yields a buffer for each bucket, from two that alternate: one is filled while the other is sent.

    `memory`: the two buffers, (2, bytes) uint8."""
    return (
        buffer[: bucket.num_bytes] for bucket, buffer in zip(buckets, cycle(memory.unbind()), strict=False)
    )
