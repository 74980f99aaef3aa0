import math
import random
from collections.abc import Sequence
from dataclasses import field
from statistics import fmean
from typing import Annotated, Any

from openrlhf.algorithms.curricula.base import Curriculum
from openrlhf.ranges import Range


class Difficulty(Curriculum):
    """Draws prompts that the policy sometimes solves more often than those that it always or never solves.

        w_i = floor + (1 - floor) * 4 r_i (1 - r_i)

    r_i is the success rate of prompt i, 1/2 at the start; each of its groups changes it to memory * r_i +
    (1 - memory) * (the group's mean score, clipped to 0 and 1). Prompts are drawn one after the other, with
    probabilities in proportion to their weights w, among those that are not being sampled. As in
    https://doi.org/10.1016/j.ipl.2005.11.003, the next prompt is the one with the largest log(u_i) / w_i, for
    random u_i that are drawn anew after each observation.
    """

    name = "difficulty"
    floor: Annotated[float, Range(above=0, at_most=1)] = 0.05
    """Weight of a prompt that is always or never solved; the largest weight is 1."""
    memory: Annotated[float, Range(at_least=0, below=1)] = 0.5
    """Share of earlier groups in the success rate."""
    rates: dict[int, float] = field(init=False, default_factory=dict)
    sampled: set[int] = field(init=False, default_factory=set)
    """Prompts that are being sampled."""
    num_observed: int = field(init=False, default=0)
    ranked: list[int] = field(init=False, default_factory=list)
    """All other prompts, the next one last; empty: not known yet."""

    def weight(self, index: int) -> float:
        rate = self.rates.get(index, 0.5)
        return self.floor + (1 - self.floor) * 4 * rate * (1 - rate)

    def choose(self) -> int:
        if not self.ranked:
            rng, numbers = random.Random(f"{self.seed}/{self.num_observed}"), range(len(self.prompts))
            keys = [math.log(1 - rng.random()) / self.weight(i) for i in numbers]
            if len(self.sampled) == len(numbers):
                self.sampled = set()
            self.ranked = sorted(self.sampled.symmetric_difference(numbers), key=keys.__getitem__)
        self.sampled.add(chosen := self.ranked.pop())
        return chosen

    def observe(self, index: int, scores: Sequence[float]) -> None:
        self.num_observed, self.ranked = self.num_observed + 1, []
        self.sampled.discard(index)
        if scores:
            mean = min(max(fmean(scores), 0.0), 1.0)
            self.rates[index] = self.memory * self.rates.get(index, 0.5) + (1 - self.memory) * mean

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self.rates), "sampled": sorted(self.sampled), "num_observed": self.num_observed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.sampled, self.ranked = dict(state["rates"]), {*state["sampled"]}, []
        self.num_observed = state["num_observed"]
