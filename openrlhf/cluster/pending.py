"""Pending results of calls to Ray actors: implements `Pending` of backends/base.py."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ray

ResultT = TypeVar("ResultT")

Handle = Any
"""An actor handle. Ray does not type its methods."""


class Gathered(Generic[ResultT]):
    """Pending calls on several workers, combined into one result."""

    def __init__(self, refs: Sequence[ray.ObjectRef], combine: Callable[[list], ResultT]) -> None:
        self.refs, self.combine = refs, combine

    def result(self) -> ResultT:
        return self.combine(ray.get(list(self.refs)))


def first(results: list) -> Any:
    """Returns the first result, for calls to which all ranks return the same."""
    return results[0]
