"""The engines' control plane as the trainer uses it in a weight sync, and the error for engines that
failed."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from openrlhf.errors import ErrorCode, RunError


class EngineClient(Protocol):
    """The control plane of all rollout engines. Each call is sent to the engines that have not failed, and
    waits for them."""

    version: int
    """Weight version that `finish_weight_update` sets."""
    workers_per_engine: int
    failures: dict[int, str]
    """Maps the index of an engine that failed to its error."""
    dead: set[int]
    """Indices of the engines among them whose process is gone."""
    ends_with_first: bool
    """True while the first engine's error must be raised at once, because the other engines would never
    answer."""

    @property
    def num_engines(self) -> int: ...

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Connects the engines. The first worker of engine i gets the rank `init_info["rank_offset"] + i *
        workers_per_engine`."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict | list[dict]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def checksums(self) -> dict[int, list[int]]:
        """Returns, for each engine, each worker's checksum of the weights that it loaded since
        `start_weight_update`; see `Checksum`."""
        ...


class EnginesFailedError(RunError):
    """Raised if some engines failed in a weight sync. The others have the new version."""

    def __init__(
        self, version: int, failures: Mapping[int, str], num_engines: int, dead: Collection[int] = ()
    ) -> None:
        """`failures`: engine index -> error; `dead`: indices of engines whose process is gone."""
        whole = [str(i) for i in range(num_engines) if i not in failures]
        first = f"weight sync {version} failed; engines with version {version}: {', '.join(whole) or 'none'}"
        lines = [first, *(f"inference engine {i}: {text}" for i, text in failures.items())]
        super().__init__(ErrorCode.ENGINE_FAILED, "\n".join(lines))
        self.args = version, failures, num_engines, dead  # the arguments with which pickle calls __init__
        self.failures, self.dead = dict(failures), frozenset(dead)


class Transfer(Protocol):
    """A transport of weights, on one trainer rank."""

    def send_weights(self) -> None:
        """Pauses the engines, sends all weights, and resumes the engines. Collective."""
        ...


class Rendezvous(NamedTuple):
    """The address at which the engines' workers connect to a trainer's rank."""

    address: str
    port: int
    rank: int
    """Rank of this process in the trainer."""
    bucket_bytes: int
