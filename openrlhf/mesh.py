"""Mesh of a model's ranks: data, sequence and tensor parallel coordinates. Pure arithmetic; the process
groups are in backends/distributed.py."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class Coordinates(NamedTuple):
    """Coordinates of one rank in a mesh."""

    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Three-dimensional arrangement of ranks.

    Ranks along `data` have different samples. The `sequence * tensor` ranks of one data coordinate have the
    same samples and share the work on them. Ranks are numbered along tensor first, then sequence, then data,
    so that ranks that communicate most are neighbours on one node.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1

    DIMENSIONS: ClassVar = Coordinates._fields

    @classmethod
    def within(cls, num_ranks: int, *, sequence: int = 1, tensor: int = 1) -> "Mesh":
        """Returns the largest mesh with these sizes on at most `num_ranks` ranks, but at least one copy of
        the model."""
        return Mesh(data=max(1, num_ranks // (sequence * tensor)), sequence=sequence, tensor=tensor)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the dimensions, in the order of DIMENSIONS."""
        return self.data, self.sequence, self.tensor

    @property
    def replica(self) -> int:
        """Number of ranks that have the same samples."""
        return self.sequence * self.tensor

    @property
    def copies(self) -> int:
        """Number of ranks that have the same tensor parallel slice of the weights."""
        return self.data * self.sequence

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.replica

    @property
    def leaders(self) -> range:
        """First rank of each data coordinate; it answers for all ranks with the same samples."""
        return range(0, self.size, self.replica)

    def coordinates(self, rank: int) -> Coordinates:
        data, inner = divmod(rank, self.replica)
        return Coordinates(data, *divmod(inner, self.tensor))
