"""The control plane of rollout engines in a weight sync, and the error for engines that failed."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from openrlhf.errors import ErrorCode, RunError


class EngineClient(Protocol):
    """The control plane of all rollout engines. Every call goes to the engines that have not failed, and
    waits for them."""

    version: int
    """Version that `finish_weight_update` gives to the weights."""
    workers_per_engine: int
    failures: dict[int, str]
    """Maps the number of an engine that failed to its error."""
    ends_with_first: bool
    """True while an engine's error must be raised at once, because the others would never answer."""

    @property
    def num_engines(self) -> int: ...

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Connects the engines. The workers of engine i get ranks from `init_info["rank_offset"] + i *
        workers_per_engine` on."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict | list[dict]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def checksums(self) -> dict[int, list[int]]:
        """Returns, by engine, each worker's checksum of what it loaded since `start_weight_update`, see
        `Checksum`."""
        ...


class EnginesFailedError(RunError):
    """Raised when some engines failed in a weight sync. The others have the new version."""

    def __init__(self, version: int, failures: Mapping[int, str], num_engines: int) -> None:
        whole = [str(i) for i in range(num_engines) if i not in failures]
        first = f"weight sync {version} failed; engines with version {version}: {', '.join(whole) or 'none'}"
        lines = [first, *(f"inference engine {i}: {text}" for i, text in failures.items())]
        super().__init__(ErrorCode.ENGINE_FAILED, "\n".join(lines))
        self.args = version, failures, num_engines  # pickled with these
        self.failures = dict(failures)


class Transfer(Protocol):
    def send_weights(self) -> None:
        """Sends all weights, and pauses and resumes the engines around it. Every rank calls it."""
        ...


class Rendezvous(NamedTuple):
    """Address at which a trainer's rank meets the engines' workers."""

    address: str
    port: int
    rank: int
    """Rank of this process in the trainer."""
    bucket_bytes: int
