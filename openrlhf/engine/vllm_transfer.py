"""The inference side of a weight sync: runs inside vLLM's workers, which import it as their extension.

Importing this module registers our transfer backends: `openrlhf_gloo` for machines without a GPU, and vLLM's
`nccl` and `ipc` with a checksum of what they load.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from openrlhf.engine import peak_memory
from openrlhf.engine.weight_sync import PLACES, Checksum, TensorMeta, broadcast, gloo_group, plan_buckets

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class WorkerExtension:
    """Methods that an engine calls on all of its workers."""

    weight_transfer_engine: "CheckedLoading"
    """Of the worker that this is mixed into."""
    model_runner: Any
    """Of the same worker."""

    def make_stage_buffers(self) -> None:
        """For what a stage gets from the one before it. vLLM makes them while it warms up, which it does not
        on a CPU unless it compiles."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def loaded_checksum(self) -> int:
        """Of everything loaded since the last `start_weight_update`."""
        return self.weight_transfer_engine.checksum.value

    def peak_memory(self) -> int:
        """Bytes, since it was last asked for."""
        peak = peak_memory.peak()
        peak_memory.restart()
        return peak

    def unwritten_parameters(self) -> list[str]:
        """Those that hold what they held before the first update. Without those that vLLM has packed away."""
        engine = self.weight_transfer_engine
        return [name for name, now in _fingerprints(engine.model).items() if engine.at_start[name] == now]


class CheckedLoading(WeightTransferEngine):
    """Mixin for transfer engines: sums up what goes into `load_weights` during an update."""

    model: Any
    """One of vLLM's, which have `load_weights`."""

    checksum = Checksum()
    at_start: dict[str, int]
    """Fingerprints of the parameters before the first update."""

    def start_weight_update(self) -> None:
        if not hasattr(self, "at_start"):
            self.at_start = _fingerprints(self.model)
        self.checksum = Checksum()
        load, checksum = type(self.model).load_weights, self.checksum

        def checked_load(weights: Iterable[tuple[str, Tensor]]) -> Any:
            return load(self.model, _counted(weights, checksum))

        self.model.load_weights = checked_load
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        del self.model.load_weights
        super().finish_weight_update()
        peak_memory.restart()  # what generation needs comes now


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    tensors: list = field(default_factory=list)
    """[name, dtype, shape] of each tensor, in the order of sending."""


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives buckets over a private gloo group. For CPU workers."""

    model: Any
    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = gloo_group(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self.group is not None  # the trainer opens the transfer first
        tensors = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in update_info.tensors]
        for bucket in plan_buckets(tensors):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            broadcast(self.group, buffer)
            self.model.load_weights([(meta.name, view) for meta, view in bucket.views(buffer)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU a linear layer keeps a packed copy of its weight. A reload packs again only the layers that
        # received weights, and a tied head receives none.
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.group = None


class CheckedGloo(CheckedLoading, GlooReceiver):
    pass


class CheckedNCCL(CheckedLoading, NCCLWeightTransferEngine):
    pass


class CheckedIPC(CheckedLoading, IPCWeightTransferEngine):
    pass


def _counted(weights: Iterable[tuple[str, Tensor]], checksum: Checksum) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        checksum.add(name, tensor)
        yield name, tensor


def _fingerprints(model: nn.Module) -> dict[str, int]:
    """A checksum of the first elements of each parameter that has any: enough to see whether it was written,
    and cheap on a large model."""
    found = {}
    for name, param in model.named_parameters():
        if param.numel():
            checksum = Checksum()
            checksum.add(name, param.detach().flatten()[:PLACES])
            found[name] = checksum.value
    return found


def _repack_experts_on_reload() -> None:
    """vLLM's CPU experts are packed on the first load only; pack them again on every later one."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    first_setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup(self: UnquantizedFusedMoEMethod, layer: "RoutedExperts", w13: Tensor, w2: Tensor) -> None:
        is_reload = self.moe_kernel is not None
        first_setup(self, layer, w13, w2)
        if is_reload:
            assert self.moe_kernel is not None  # the setup has made one
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup


for _name, _engine in {"gloo": CheckedGloo, "nccl": CheckedNCCL, "ipc": CheckedIPC}.items():
    WeightTransferEngineFactory.register_engine(f"openrlhf_{_name}", _engine)
if current_platform.is_cpu():
    _repack_experts_on_reload()
