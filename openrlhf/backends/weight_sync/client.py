"""The control plane of engines in a weight sync, and what became of engines that failed."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class EngineClient(Protocol):
    """The inference engines' control plane, all engines as one. Every call goes to those that have not failed
    and waits for them."""

    version: int
    """Label that `finish_weight_update` gives to the weights."""
    workers_per_engine: int
    failures: dict[int, str]
    """Engines by their number, and what became of them."""
    ends_with_first: bool
    """Raise an engine's error at once, because the others would never answer."""

    @property
    def num_engines(self) -> int: ...

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Engine i takes the ranks from `init_info["rank_offset"] + i * workers_per_engine` on."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict | list[dict]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def checksums(self) -> dict[int, list[int]]:
        """What each engine's workers loaded since `start_weight_update`, see `Checksum`."""
        ...


class EnginesFailedError(RuntimeError):
    """Engines that failed in a weight sync. Those that did not hold the new version."""

    def __init__(self, version: int, failures: Mapping[int, str], num_engines: int) -> None:
        super().__init__(version, failures, num_engines)
        self.version, self.failures, self.num_engines = version, dict(failures), num_engines

    def __str__(self) -> str:
        whole = [str(i) for i in range(self.num_engines) if i not in self.failures]
        told = "\n".join(f"inference engine {i}: {text}" for i, text in self.failures.items())
        left = f"engines with version {self.version}: {', '.join(whole) or 'none'}"
        return f"weight sync {self.version} failed; {left}\n{told}"


class Transfer(Protocol):
    def send_weights(self) -> None:
        """The whole round, engines paused and resumed. Every rank calls it."""
        ...


class Rendezvous(NamedTuple):
    """Where a trainer's rank meets the engines' workers."""

    address: str
    port: int
    rank: int
    """Of the trainer."""
    bucket_bytes: int
