"""Calls of a rank's process are counted: a process with work that makes no progress hangs."""

from types import SimpleNamespace

import pytest

from openrlhf.cluster.actors import _counted


def test_calls_are_counted_while_they_run() -> None:
    rank, depths = SimpleNamespace(depth=0, num_calls=0), []

    def call(self: SimpleNamespace, level: int) -> None:
        depths.append(self.depth)
        if level:
            counted(self, level - 1)
        else:
            raise KeyError

    counted = _counted(call)
    with pytest.raises(KeyError):
        counted(rank, level=2)
    assert depths == [1, 2, 3] and (rank.depth, rank.num_calls) == (0, 3)
