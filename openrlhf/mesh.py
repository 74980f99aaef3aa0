"""How the ranks of a model share its work: data, sequence and tensor parallel. Plain numbers; the process
groups are in backends/distributed.py."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class Coordinates(NamedTuple):
    """Of one rank in a mesh."""

    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Ranks in three dimensions.

    Along `data` each rank has samples of its own. The `sequence * tensor` ranks of one data coordinate have
    the same samples and share the work on them. Ranks are counted along tensor first, then sequence, then
    data: those that exchange most are neighbours, and on one node.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1

    DIMENSIONS: ClassVar = Coordinates._fields

    @classmethod
    def within(cls, num_ranks: int, *, sequence: int = 1, tensor: int = 1) -> "Mesh":
        """The largest of these dimensions that has no more than `num_ranks`, but at least one copy of the
        model."""
        return Mesh(data=max(1, num_ranks // (sequence * tensor)), sequence=sequence, tensor=tensor)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes, in the order of DIMENSIONS."""
        return self.data, self.sequence, self.tensor

    @property
    def replica(self) -> int:
        """Ranks that have the same samples."""
        return self.sequence * self.tensor

    @property
    def copies(self) -> int:
        """Ranks that have the same part of the matrices."""
        return self.data * self.sequence

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.replica

    @property
    def leaders(self) -> range:
        """The first rank of each data coordinate. What all ranks with the same samples know, it says."""
        return range(0, self.size, self.replica)

    def coordinates(self, rank: int) -> Coordinates:
        data, inner = divmod(rank, self.replica)
        return Coordinates(data, *divmod(inner, self.tensor))

    def rank_at(self, at: Coordinates) -> int:
        """The rank with these coordinates."""
        return (at.data * self.sequence + at.sequence) * self.tensor + at.tensor

    def group(self, dimension: str, rank: int) -> list[int]:
        """The ranks whose coordinates are those of `rank` but in this dimension."""
        at = self.coordinates(rank)
        return [self.rank_at(at._replace(**{dimension: i})) for i in range(getattr(self, dimension))]
