"""Keeps random states per episode, for environments that draw from the process's global generators."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np


class GlobalRandom:
    """One episode's states of the global random generators of Python and numpy, seeded and independent of
    other episodes. Calls of all episodes of a process run one after the other."""

    _one_at_a_time = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    def within(self, method: Callable) -> Callable:
        """Returns `method` wrapped to draw from this episode's states."""

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._here():
                return method(*arguments, **options)

        return call

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._one_at_a_time:
            outside = _states()
            _set(self._states)
            try:
                yield
            finally:
                self._states = _states()
                _set(outside)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
