"""Stand-ins for the processes of a run: they compute nothing and log each call on a line, with its start and
end. Ray's workers receive this code with the actor and import nothing for it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

LOG = Path()
"""File of the log; tests set it before a process starts."""
PAUSE = 0.05
"""Seconds that a call takes, so that calls that may overlap do."""


class Event(NamedTuple):
    start: float
    end: float
    who: str
    what: str


def events() -> list[Event]:
    lines = (line.split("\t") for line in LOG.read_text().splitlines())
    return sorted(Event(float(start), float(end), who, what) for start, end, who, what in lines)


def note(who: str, what: str) -> None:
    start = time.monotonic()
    time.sleep(PAUSE)
    with LOG.open("a") as file:
        file.write(f"{start}\t{time.monotonic()}\t{who}\t{what}\n")


class Rank:
    """Rank of any model; it logs the calls of its worker."""

    def __init__(self, config: Any, rank: int, mesh: Any, **place: Any) -> None:
        self.name = type(self).__name__

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(held=1, free=60, total=80)

    def weight_bytes(self) -> int:
        return 1

    def start(self, *_: Any) -> None:
        note(self.name, "start")

    def open_weight_sync(self, *_: Any) -> None:
        pass

    def send_weights(self, version: int, *_: Any) -> list:
        note(self.name, "send_weights")
        return []

    def peak_memory(self) -> dict[str, int]:
        return {"logprobs": 2**30}

    def call(self, method: str, count: int, *arguments: Any) -> Any:
        note(self.name, method)
        if method == "forward":
            return arguments[0].rollout_log_probs
        return ([{"loss": 0.0}], None) if method == "update" else None


class Policy(Rank):
    pass


class Critic(Rank):
    pass


class Reference(Rank):
    def start(self, *_: Any) -> None:
        note("Reference", "start")


class Engine:
    def __init__(self, *_: Any) -> None:
        from openrlhf.cluster.engine_handle import SamplingTasks

        self.groups = SamplingTasks(self.run_group)

    async def start(self, *_: Any) -> None:
        note("Engine", "start")

    async def run_group(self, prompt: Any, *_: Any) -> SimpleNamespace:
        note("Engine", "run_group")
        return SimpleNamespace(group=SimpleNamespace(prompt=prompt, trajectories=[]), done=0)

    async def submit_groups(self, requests: dict[int, Any]) -> None:
        self.groups.submit(requests)

    async def finished_groups(self) -> dict[int, Any]:
        return await self.groups.finished()

    async def peak_memory(self) -> dict[str, int]:
        return {"generate": 2**29}

    async def answer(self, *_: Any) -> SimpleNamespace:
        note("Engine", "answer")
        return SimpleNamespace(version=0)

    async def sleep(self) -> None:
        note("Engine", "sleep")

    async def wake(self, tags: list[str]) -> None:
        note("Engine", f"wake {' '.join(tags)}")

    async def close(self) -> None:
        pass
