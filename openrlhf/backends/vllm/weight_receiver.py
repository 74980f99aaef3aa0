"""The engines' side of a weight sync. vLLM's workers import it as their extension.

Importing this module registers this package's transports with vLLM: `openrlhf_gloo` for machines without a
GPU, `openrlhf_ray` for any machine, and `openrlhf_nccl` and `openrlhf_ipc`, which are vLLM's own with a
checksum of the loaded weights.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from openrlhf.backends import peak_memory
from openrlhf.backends.vllm import parent_death_guard
from openrlhf.backends.weight_sync.buckets import Bucket, parse_metas, plan_buckets
from openrlhf.backends.weight_sync.checksum import PLACES, Checksum
from openrlhf.backends.weight_sync.gloo import Connection
from openrlhf.backends.weight_sync.source import ADAPTER_MARKS
from openrlhf.backends.weight_sync.stored_weights import WeightFingerprint, random_input
from openrlhf.faults import fault

parent_death_guard.follow()


class WorkerExtension:
    """Methods that an engine calls on all of its workers. vLLM adds this class to its worker class as a
    mixin."""

    weight_transfer_engine: "CheckedLoading"
    """vLLM's transfer engine of the worker."""
    add_lora: Callable[[LoRARequest], bool]
    model_runner: Any
    """vLLM's model runner of the worker."""

    def make_stage_buffers(self) -> None:
        """Creates the buffers for a pipeline stage's input. vLLM creates them in its warm-up, which it skips
        on a CPU without compilation."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def record_routing(self) -> None:
        """Starts recording the routing of requests."""
        from openrlhf.backends.vllm.on_cpu.routing import RoutingRecorder  # no worker on a GPU imports it

        self.routing = RoutingRecorder(self.model_runner)

    def take_routing(self, name: str) -> dict[int, tuple[bytes, str, tuple[int, ...]]]:
        """Returns a request's routing, see `RoutingRecorder.take`."""
        return self.routing.take(name)

    def loaded_checksum(self) -> int:
        """Returns the checksum of the weights that were loaded since the last `start_weight_update`."""
        return self.weight_transfer_engine.checksum.value

    def peak_memory(self) -> int:
        """Returns the peak memory in bytes since the last call."""
        peak = peak_memory.peak()
        peak_memory.restart()
        return peak

    def unwritten_parameters(self) -> list[str]:
        """Returns the names of parameters whose values have not changed since before the first update.
        Parameters that vLLM has packed and removed are not among them."""
        engine = self.weight_transfer_engine
        return [name for name, now in _fingerprints(engine.model).items() if engine.at_start[name] == now]

    def layer_fingerprints(self, lengths: dict[str, int]) -> dict[str, tuple]:
        """Returns fingerprints of weights as this worker's layers compute with them. `lengths`: checkpoint
        name
        -> length of the trainer's fingerprint. Weights that cannot be read back are omitted."""
        found = {}
        for stored, names in _stored_together(self.weight_transfer_engine.model, lengths).items():
            values = _layer_output(self.weight_transfer_engine.model, stored)
            if values is not None and len(values) == sum(lengths[name] for name in names):
                parts = values.split([lengths[name] for name in names])
                found |= {
                    name: tuple(WeightFingerprint.of(part)) for name, part in zip(names, parts, strict=True)
                }
        return found

    def use_adapter(self, number: int, config: dict[str, Any]) -> None:
        """Replaces the adapter with id `number` by that of the last update. `config`: its peft configuration.
        The adapter is written to a temporary folder, because vLLM can only load adapters from folders."""
        tensors = self.weight_transfer_engine.adapter
        with TemporaryDirectory(prefix="adapter-") as folder:
            save_file(tensors, f"{folder}/adapter_model.safetensors")
            Path(folder, "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            self.add_lora(LoRARequest("policy", number, folder, load_inplace=True))


class CheckedLoading(WeightTransferEngine):
    """Mixin for transfer engines. During an update it computes the checksum of the input of `load_weights`,
    collects an adapter's tensors for `use_adapter`, and replaces weights only if the update has any."""

    model: Any
    """The worker's vLLM model, with a method `load_weights`."""

    checksum = Checksum()
    at_start: dict[str, int]
    """Fingerprints of the parameters from before the first update."""
    adapter: dict[str, Tensor]
    """The adapter's tensors of the last update, by peft's names."""
    is_replacing = False
    """True once the update has received weights. Until the update ends, the model is incomplete."""

    def start_weight_update(self) -> None:
        if not hasattr(self, "at_start"):
            self.at_start = _fingerprints(self.model)
        self.checksum, self.adapter, self.is_replacing = Checksum(), {}, False
        self.model.load_weights = self._load

    def finish_weight_update(self) -> None:
        del self.model.load_weights
        if self.is_replacing:
            super().finish_weight_update()
        peak_memory.restart()  # later peaks are those of generation

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        fault("sync.load")
        weights = []
        for name, tensor in tensors:
            self.checksum.add(name, tensor)
            if any(mark in name for mark in ADAPTER_MARKS):
                self.adapter[name] = tensor.to("cpu", copy=True)  # the buffer is reused
            else:
                weights.append((name, tensor))
        if not weights:
            return None
        if not self.is_replacing:
            super().start_weight_update()
            self.is_replacing = True
        with _without_lora_wrappers(self.model):
            return type(self.model).load_weights(self.model, weights)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    """Rank of the engine's first worker among the workers of all engines. It is also the name of the engine's
    group."""
    memory: list
    """Address of the trainer's buffers, see `SharedMemory`."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    tensors: list = field(default_factory=list)
    """[name, dtype, shape] of each tensor, in the order in which they are sent."""
    bucket_bytes: int = 0
    """The sender's bucket size in bytes, from which the receiver computes the layout of buckets."""


@dataclass
class RayInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class RayUpdateInfo(WeightTransferUpdateInfo):
    tensors: list = field(default_factory=list)
    """[name, dtype, shape] of each tensor in the bucket."""
    data: bytes = b""
    """Bytes of the bucket."""


class Reloading(WeightTransferEngine):
    """Mixin for transfer engines that replaces the model's weights by vLLM's layerwise reload."""

    model: Any

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if not current_platform.is_cpu():
            return
        # On a CPU a linear layer has a packed copy of its weight. A reload repacks only layers that received
        # weights, which a tied head does not.
        for head in _tied_heads(self.model):
            head.quant_method.process_weights_after_loading(head)


class RayReceiver(Reloading, WeightTransferEngine[RayInitInfo, RayUpdateInfo]):
    """Receives buckets as arguments of control-plane calls."""

    init_info_cls = RayInitInfo
    update_info_cls = RayUpdateInfo

    def init_transfer_engine(self, init_info: RayInitInfo) -> None:
        pass

    def receive_weights(self, update_info: RayUpdateInfo) -> None:
        bucket = Bucket(tuple(parse_metas(update_info.tensors)))
        buffer = torch.frombuffer(bytearray(update_info.data), dtype=torch.uint8).to(self.device)
        self.model.load_weights([(meta.name, view) for meta, view in bucket.views(buffer)])

    def shutdown(self) -> None:
        pass


class GlooReceiver(Reloading, WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives buckets over a private connection, for workers on a CPU."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        self.connection = Connection(
            init_info.master_address,
            init_info.master_port,
            name=str(init_info.rank_offset),
            rank=1 + parallel.rank,
            world_size=1 + parallel.world_size,
            memory=init_info.memory,
        )

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        buckets = plan_buckets(parse_metas(update_info.tensors), update_info.bucket_bytes)
        try:
            for bucket, buffer in self.connection.received(buckets):
                self.model.load_weights([(meta.name, view) for meta, view in bucket.views(buffer)])
        except BaseException:
            self.connection.close()
            raise

    def shutdown(self) -> None:
        pass


class CheckedGloo(CheckedLoading, GlooReceiver):
    pass


class CheckedRay(CheckedLoading, RayReceiver):
    pass


class CheckedNCCL(CheckedLoading, NCCLWeightTransferEngine):
    pass


class CheckedIPC(CheckedLoading, IPCWeightTransferEngine):
    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()  # with adapters, too: unmaps the trainer's buffer


def _tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """Returns the heads that share their weight with another layer."""
    layers = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    owners = Counter(id(layer.weight) for layer in layers)
    return [m for m in layers if isinstance(m, ParallelLMHead) and owners[id(m.weight)] > 1]


@contextmanager
def _without_lora_wrappers(model: nn.Module) -> Iterator[None]:
    """Removes vLLM's LoRA wrappers around layers within the context, because the model's loader expects the
    bare layers."""
    wrapped = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseLayerWithLoRA)]
    for name, layer in wrapped:
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped:
            model.set_submodule(name, layer)


def _stored_together(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns, for vLLM's name of a weight, the checkpoint's names of the weights that are concatenated in
    it. Weights that vLLM stores more than once are omitted."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in names:
        stored, shard = (mapper and mapper._map_name_with_shard(name)) or (name, None)
        if not isinstance(shard, (list, tuple)):  # a list: vLLM stores it more than once
            found[stored].append(("qkv".find(shard) if isinstance(shard, str) else shard or 0, name))
    return {stored: [name for _, name in sorted(parts)] for stored, parts in found.items()}


@torch.no_grad()
def _layer_output(model: nn.Module, name: str) -> Tensor | None:
    """Returns a layer's output (n,) for a random input, without bias, if `name` is a matrix, and the weight
    itself if it is a vector. None if the weight cannot be read back: its layer is of an unknown kind, packed,
    or split among workers."""
    owner, _, kind = name.rpartition(".")
    layer = dict(model.named_modules()).get(owner)
    if isinstance(layer, BaseLayerWithLoRA):
        layer = layer.base_layer
    weight = getattr(layer, kind, None)
    if not isinstance(weight, Tensor):
        return None
    if isinstance(layer, LinearBase) and kind == "weight":
        if layer.tp_size > 1:
            return None
        given = random_input(layer.input_size).to(layer.params_dtype).to(weight.device)
        return layer.quant_method.apply(layer, given[None])[0]
    if isinstance(layer, VocabParallelEmbedding) and kind == "weight" and weight.numel():
        rows = weight[: layer.org_vocab_size]
        return rows.float() @ random_input(rows.shape[1]).to(rows.device)
    return weight if weight.dim() == 1 and weight.numel() else None


def _fingerprints(model: nn.Module) -> dict[str, int]:
    """Returns a checksum of the first elements of each non-empty parameter, from which one can see cheaply
    whether the parameter was written."""
    found = {}
    for name, param in model.named_parameters():
        if param.numel():
            checksum = Checksum()
            checksum.add(name, param.detach().flatten()[:PLACES])
            found[name] = checksum.value
    return found


BACKENDS = {"gloo": CheckedGloo, "ray": CheckedRay, "nccl": CheckedNCCL, "ipc": CheckedIPC}
for _name, _engine in BACKENDS.items():
    WeightTransferEngineFactory.register_engine(f"openrlhf_{_name}", _engine)
if current_platform.is_cpu():
    from openrlhf.backends.vllm.on_cpu import patch

    patch()
