"""The batches that a loop has made: how often the policy had changed before each, and what it was made of."""

from collections import deque
from typing import NamedTuple
from weakref import ref

import numpy as np

from openrlhf.types import Batch


class Origin(NamedTuple):
    """The record that a run keeps of a batch. Its arrays also tell which batch that is: copies with other
    columns share them."""

    actions: ref[np.ndarray] | None = None
    """Its column `rollout_log_probs`."""
    log_probs: ref[np.ndarray] | None = None
    """Its column `log_probs`; None without one."""
    num_changes: int = 0
    """Number of changes of the policy before."""
    num_sampled: int = 0
    """Number of its episodes, with failed ones."""
    num_finished: int = 0
    """Number of finished ones, by which the KL coefficient adapts."""
    kl_mean: float | None = None
    """Mean KL; None if it has no log-probs, and the coefficient does not adapt."""

    def has_log_probs_of(self, batch: Batch) -> bool:
        """Returns True if the batch has its first log-probs, or as at first none."""
        return batch.log_probs is (self.log_probs and self.log_probs())


class Origins:
    """The origins of the last batches of a loop."""

    def __init__(self) -> None:
        self._last: deque[Origin] = deque(maxlen=64)

    def add(
        self, batch: Batch, *, num_changes: int, num_sampled: int, num_finished: int, kl_mean: float | None
    ) -> None:
        self._last.append(
            Origin(
                actions=ref(batch.rollout_log_probs),
                log_probs=None if batch.log_probs is None else ref(batch.log_probs),
                num_changes=num_changes,
                num_sampled=num_sampled,
                num_finished=num_finished,
                kl_mean=kl_mean,
            )
        )

    def of(self, batch: Batch, num_changes: int) -> Origin:
        """Returns the origin of a batch. A batch that the loop has put together itself counts as a part of
        the last one, or without one as made after `num_changes` changes."""
        for origin in reversed(self._last):
            if origin.actions is not None and origin.actions() is batch.rollout_log_probs:
                return origin
        last = self._last[-1] if self._last else Origin(num_changes=num_changes)
        return last._replace(log_probs=None, num_sampled=len(batch), num_finished=len(batch))
