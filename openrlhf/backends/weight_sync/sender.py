"""The trainer's side of a weight sync. Speaks vLLM's weight-transfer protocol.

    client.start_weight_update()     engines pause; their weights are being replaced
    send                             names and shapes once, then the tensors in buckets
    client.finish_weight_update(v)   engines hold version v, drop their caches and resume
    check                            engines must have loaded exactly what was sent

`gloo` broadcasts over TCP and `ray` hands buckets to the control plane. `nccl` and `ipc` are vLLM's own, and
import it. With all but `nccl` an engine that fails leaves the others whole: they finish their update before
EnginesFailedError says which it was. All engines of `nccl` are in one group, which ends with any of them.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from openrlhf.backends.weight_sync.client import EngineClient, EnginesFailedError, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import Sendable, WeightSource
from openrlhf.config.choices import LoraSync

BUCKET_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20, "ipc": 512 << 20, "ray": 64 << 20}
"""Of weights that travel at a time, unless `--vllm.sync_bucket_mb` says otherwise. On a CPU memory of more
than 32 MiB is new to the process each time, which takes longer than to copy it. Of a buffer that processes on
one GPU share each filling is a round trip to all engines, and so is each bucket of Ray's."""
OPEN_TRANSFER = {
    "gloo": "openrlhf.backends.weight_sync.gloo:open_gloo",
    "ray": "openrlhf.backends.weight_sync.ray:open_ray",
    "nccl": "openrlhf.backends.vllm.gpu_transfers:open_nccl",
    "ipc": "openrlhf.backends.vllm.gpu_transfers:open_ipc",
}
"""Maps ways for weights to functions (source, client, meeting) -> Transfer, imported where they are used."""


class WeightSender:
    """One trainer rank's end. Every rank calls `send`; rank 0 talks to the engines."""

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
        """`address`, `port`: where rank 0 can be reached. `bucket_bytes`: of weights that travel at a
        time."""
        self.source, self.client, self.rank = WeightSource(engine, lora_sync), client, rank
        meeting = Rendezvous(address, port, rank, bucket_bytes or BUCKET_BYTES[backend])
        module, _, function = OPEN_TRANSFER[backend].partition(":")
        self.transfer: Transfer = getattr(import_module(module), function)(self.source, client, meeting)

    def send(self, version: int) -> None:
        """Raises EnginesFailedError where engines failed, or loaded something else than what was sent, once
        the others hold the new version."""
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
    """What to say of engines with workers that loaded something else."""
    return {
        i: f"worker {worker} loaded other weights than the trainer sent (checksum {checksum:#x}, expected "
        f"{sent:#x})"
        for i, checksums in loaded.items()
        for worker, checksum in enumerate(checksums)
        if checksum != sent
    }
