"""Base class of curricula."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from openrlhf.registry import Selectable


class Curriculum(Selectable, ABC):
    """Chooses which prompts a run samples next, by the scores of earlier ones.

    There is one instance for a run; with quotas one for each task, which chooses among the prompts of the
    task. Calls come in an order that depends on prompts and scores alone.
    """

    prompts: Sequence[Any] = field(init=False)
    """The prompts to choose from: records `Prompt`, without the data of images."""
    seed: int = field(init=False)
    """The run's seed, `--train.seed`."""

    @abstractmethod
    def choose(self) -> int:
        """Returns the index in `prompts` of the next prompt to sample, which may have been chosen before."""

    def observe(self, index: int, scores: Sequence[float]) -> None:
        """Receives the scores of the finished samples of a prompt, once for each time it was chosen: when a
        step trains on them or filters them. `scores` is empty if all samples failed."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs: numbers, texts, tensors, lists, dictionaries."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
