"""The trainer's side of vLLM's own weight transfers: NCCL, and CUDA IPC between processes on one GPU."""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.device_allocator import alloc_conf
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from openrlhf.backends.weight_sync.buckets import max_bucket_bytes
from openrlhf.backends.weight_sync.client import EngineClient, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import WeightSource


def open_nccl(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    # Both sides hold two buckets, beside an engine's KV cache. A tensor larger than a bucket is sent alone.
    warnings.filterwarnings("ignore", message="Tensor .* exceeds buffer_size_bytes")
    info = NCCLTrainerInitInfo(
        meeting.address,
        meeting.port,
        1 + client.num_engines * client.workers_per_engine,
        rank=meeting.rank,
        packed_buffer_size_bytes=meeting.bucket_bytes,
    )
    client.ends_with_first = True
    ending: Any = _EndsWithEngines(client)
    return WeightTransferTrainerFactory.trainer_init(info, client=ending, source=_vllm_source(source))


class _EndsWithEngines:
    """The control plane for NCCL, with which the sender waits for all engines. If an engine fails, nothing
    can end this wait, so the process prints the error and exits."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    def __getattr__(self, method: str) -> Any:
        return getattr(self.client, method)

    def update_weights(self, update_info: dict | list[dict]) -> None:
        try:
            self.client.update_weights(update_info)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def open_ipc(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    size = max_bucket_bytes(source.tensors, meeting.bucket_bytes)  # vLLM needs room for the largest tensor
    info = IPCTrainerInitInfo(rank=meeting.rank, packed=True, packed_buffer_size_bytes=size)
    return Shareable(
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=_vllm_source(source))
    )


class Shareable:
    """Turns expandable segments off while weights are sent through CUDA IPC. Another process can open
    expandable segments only if it may trace this one, which containers forbid."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def send_weights(self) -> None:
        asked, flag = alloc_conf.alloc_conf_from_env(), alloc_conf.EXPANDABLE_SEGMENTS
        if not alloc_conf.conf_flag_enabled(asked, flag):
            self.transfer.send_weights()
            return
        alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(asked, flag, False))
        try:
            self.transfer.send_weights()
        finally:
            alloc_conf.set_alloc_conf(asked)


def _vllm_source(source: WeightSource) -> VLLMWeightSource:
    """Wraps the source in a subclass of vLLM's `WeightSource`."""

    class Source(VLLMWeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(t.name, getattr(torch, t.dtype), t.shape) for t in source.tensors]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(source)

    return Source()
