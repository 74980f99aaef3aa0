"""Keeps random states per episode, for environments that draw from the process's global generators."""

import asyncio
import random
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from openrlhf.api import call_in_time

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""The lock of each event loop that is held during a call."""


class GlobalRandom:
    """One episode's states of the global random generators of Python and numpy, seeded and independent of
    other episodes. Calls of all episodes of a process run one after the other."""

    _one_at_a_time = threading.Lock()  # also held by the thread of a call that took too long

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    async def call(self, method: Callable, *arguments: Any, seconds: float | None, **options: Any) -> Any:
        """Calls a method like `call_in_time`, drawing from this episode's states. The time begins when the
        calls of other episodes have ended."""
        async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            return await call_in_time(self._drawing(method), *arguments, seconds=seconds, **options)

    def _drawing(self, method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._one_at_a_time:
                outside = _states()
                _set(self._states)
                try:
                    return method(*arguments, **options)
                finally:
                    self._states = _states()
                    _set(outside)

        return call


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
