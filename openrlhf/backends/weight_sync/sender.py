"""The trainer's side of a weight sync, which follows vLLM's weight-transfer protocol.

    client.start_weight_update()     engines pause; their weights are being replaced
    send                             names and shapes once, then the tensors in buckets
    client.finish_weight_update(v)   engines hold version v, drop their caches and resume
    check                            engines must have loaded exactly what was sent

`gloo` broadcasts over TCP and `ray` hands buckets to the control plane. `nccl` and `ipc` are vLLM's own, and
import it. With all but `nccl` the failure of one engine does not affect the others: they finish their update
before EnginesFailedError names the failed one. With `nccl` all engines are in one group, and the failure of
one ends it.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from openrlhf.backends.weight_sync.client import EngineClient, EnginesFailedError, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import Sendable, WeightSource
from openrlhf.config.choices import LoraSync

BUCKET_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20, "ipc": 512 << 20, "ray": 64 << 20}
"""Default bytes of a bucket for each transfer backend, in place of `--vllm.sync_bucket_mb`. On a CPU a block
of more than 32 MiB is newly mapped each time, which takes longer than to copy it. With `ipc` and `ray` each
bucket costs a round trip to all engines."""
OPEN_TRANSFER = {
    "gloo": "openrlhf.backends.weight_sync.gloo:open_gloo",
    "ray": "openrlhf.backends.weight_sync.ray:open_ray",
    "nccl": "openrlhf.backends.vllm.gpu_transfers:open_nccl",
    "ipc": "openrlhf.backends.vllm.gpu_transfers:open_ipc",
}
"""Maps a transfer backend to its function (source, client, meeting) -> Transfer, imported on demand."""


class WeightSender:
    """One trainer rank's end of a weight sync. Every rank calls `send`; rank 0 calls the engines."""

    def __init__(
        self,
        engine: Sendable,
        client: EngineClient,
        *,
        backend: str,
        address: str,
        port: int,
        rank: int,
        lora_sync: LoraSync = "merged",
        bucket_bytes: int | None = None,
    ) -> None:
        """Opens the transfer. `address`, `port`: where rank 0 can be reached. `bucket_bytes`: size of a
        bucket; None: the backend's default."""
        self.source, self.client, self.rank = WeightSource(engine, lora_sync), client, rank
        meeting = Rendezvous(address, port, rank, bucket_bytes or BUCKET_BYTES[backend])
        module, _, function = OPEN_TRANSFER[backend].partition(":")
        self.transfer: Transfer = getattr(import_module(module), function)(self.source, client, meeting)

    def send(self, version: int) -> None:
        """Sends the current weights as `version`. Raises EnginesFailedError where engines failed or loaded
        other weights than were sent, once the other engines have the new version."""
        self.client.version = version
        if torch.cuda.is_available():  # vLLM's NCCL sender reads the weights on streams of its own
            torch.cuda.current_stream().synchronize()
        self.transfer.send_weights()
        self.source.were_sent()
        if self.rank == 0:
            loaded = self.client.checksums()
            failures = self.client.failures | _differing(loaded, self.source.checksum.value)
            if failures:
                raise EnginesFailedError(version, failures, self.client.num_engines)


def _differing(loaded: Mapping[int, Sequence[int]], sent: int) -> dict[int, str]:
    """Maps engines with workers that loaded other weights to an error message."""
    return {
        i: f"worker {worker} did not load the weights that the trainer sent (checksum {checksum:#x}, "
        f"expected {sent:#x})"
        for i, checksums in loaded.items()
        for worker, checksum in enumerate(checksums)
        if checksum != sent
    }
