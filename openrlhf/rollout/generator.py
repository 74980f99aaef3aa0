"""Spreads prompts over engines. Knows engines only as things that answer a prompt later."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from openrlhf.types import Prompt, Trajectory

SAMPLES_IN_FLIGHT = 512
"""Samples that an engine holds at a time: enough to fill its batch, few enough that engines of different
speed finish together."""


class Sampler(Protocol):
    def run_group(self, prompt: Prompt, purpose: str) -> Future[list[Trajectory]]:
        """All samples of one prompt; `purpose` is train or eval."""
        ...


def generate(
    prompts: Sequence[Prompt],
    samplers: Sequence[Sampler],
    *,
    purpose: str,
    num_samples: int,
    on_finished: Callable[[list[Trajectory]], None] = lambda group: None,
) -> list[Trajectory]:
    """Each prompt goes to the engine with the fewest unfinished samples. Results come in the order of
    `prompts`, whatever the order of finishing; `on_finished` hears of each group as it finishes."""
    limit = max(1, SAMPLES_IN_FLIGHT // num_samples)
    load = [0] * len(samplers)
    running: dict[Future, tuple[int, int]] = {}  # -> (index of the prompt, index of the sampler)
    groups: list[list[Trajectory]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1]
    while waiting or running:
        while waiting and min(load) < limit:
            i, prompt = waiting.pop()
            least = load.index(min(load))
            running[samplers[least].run_group(prompt, purpose)] = i, least
            load[least] += 1
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            i, sampler = running.pop(future)
            load[sampler] -= 1
            groups[i] = future.result()
            on_finished(groups[i])
    return [trajectory for group in groups for trajectory in group]
