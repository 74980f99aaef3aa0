"""The trainer's side of a weight sync, which follows vLLM's weight-transfer protocol.

    client.start_weight_update()     engines pause; their weights are being replaced
    send                             names and shapes once, then the tensors in buckets
    client.finish_weight_update(v)   engines hold version v, drop their caches and resume
    check                            engines must have loaded exactly what was sent

The transport `gloo` shares memory with engines on its machine and broadcasts to others over TCP. `ray` passes
buckets to the control plane. `nccl` and `ipc` are vLLM's own, and import vLLM. With `nccl` all engines are in
one process group, so the failure of one breaks it. With the others the remaining engines finish their update
before EnginesFailedError is raised.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from openrlhf.backends.model_rank import TrainedRank
from openrlhf.backends.weight_sync.client import EngineClient, EnginesFailedError, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import WeightSource
from openrlhf.config.choices import LoraSync

BUCKET_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20, "ipc": 512 << 20, "ray": 64 << 20}
"""Default size of a bucket in bytes for each transport, without `--vllm.sync_bucket_mb`. On a CPU a block of
more than 32 MiB is mapped anew each time, which takes longer than copying it. With `ipc` and `ray` each
bucket costs a round trip to all engines."""
OPEN_TRANSFER = {
    "gloo": "openrlhf.backends.weight_sync.gloo:open_gloo",
    "ray": "openrlhf.backends.weight_sync.ray:open_ray",
    "nccl": "openrlhf.backends.vllm.gpu_transfers:open_nccl",
    "ipc": "openrlhf.backends.vllm.gpu_transfers:open_ipc",
}
"""Maps a transport to its function (source, client, meeting) -> Transfer, which is imported on demand."""


class WeightSender:
    """One trainer rank's side of a weight sync. Every rank calls `send`; only rank 0 calls the engines."""

    def __init__(
        self,
        engine: TrainedRank,
        client: EngineClient,
        *,
        backend: str,
        address: str,
        port: int,
        rank: int,
        lora_sync: LoraSync = "merged",
        bucket_bytes: int | None = None,
    ) -> None:
        """Connects to the engines. `address`, `port`: address at which rank 0 listens. `bucket_bytes`: size
        of a bucket; None: the transport's default."""
        self.source, self.client, self.rank = WeightSource(engine, lora_sync), client, rank
        meeting = Rendezvous(address, port, rank, bucket_bytes or BUCKET_BYTES[backend])
        module, _, function = OPEN_TRANSFER[backend].partition(":")
        self.transfer: Transfer = getattr(import_module(module), function)(self.source, client, meeting)

    def send(self, version: int) -> None:
        """Sends the current weights as `version`. When the other engines have the new version, raises
        EnginesFailedError if engines failed or did not load exactly the weights that were sent."""
        self.client.version = version
        if torch.cuda.is_available():  # vLLM's NCCL sender reads the weights on other streams
            torch.cuda.current_stream().synchronize()
        self.transfer.send_weights()
        self.source.mark_sent()
        if self.rank == 0:
            loaded = self.client.checksums()
            failures = self.client.failures | _differing(loaded, self.source.checksum.value)
            if failures:
                raise EnginesFailedError(version, failures, self.client.num_engines, self.client.dead)


def _differing(loaded: Mapping[int, Sequence[int]], sent: int) -> dict[int, str]:
    """Returns engine index -> error message, for engines with a worker whose checksum differs from `sent`."""
    return {
        i: f"worker {worker} did not load the weights that the trainer sent (checksum {checksum:#x}, "
        f"expected {sent:#x})"
        for i, checksums in loaded.items()
        for worker, checksum in enumerate(checksums)
        if checksum != sent
    }
