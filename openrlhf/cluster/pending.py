"""Work that runs in the cluster, as backends/base.py wants it: something with a `result()`."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ray

ResultT = TypeVar("ResultT")

Handle = Any
"""Of an actor, whose methods Ray does not type: the tests that start it check what is called."""


class Gathered(Generic[ResultT]):
    """Calls under way on many workers, as one result."""

    def __init__(self, refs: Sequence[ray.ObjectRef], combine: Callable[[list], ResultT]) -> None:
        self.refs, self.combine = refs, combine

    def result(self) -> ResultT:
        return self.combine(ray.get(list(self.refs)))


def first(results: list) -> Any:
    """Where every rank answers the same."""
    return results[0]
