"""Offloads one rank's optimizer state, master weights and gradients between optimizer steps.

DeepSpeed's `offload_states` is used for gradient buffers only. It moves optimizer states only at ZeRO stage 3
and only those of FusedAdam, which needs a CUDA compiler; and it leaves its host buffers in the optimizer's
state, so that checkpoints would contain them.
"""

from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from openrlhf.device import DEVICE_TYPE

GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)

PIECE = 1 << 28
"""Maximum elements of one host tensor, 1 GiB of float32: torch rounds the size of pinned memory up to a power
of two."""


class OptimizerState:
    """Master weights, optimizer state and gradients of a DeepSpeed engine at ZeRO stage 1, 2 or 3."""

    def __init__(self, engine: Any, *, on_host: bool) -> None:
        """`on_host`: True if the optimizer state is always in CPU memory (--ds.adam_offload); then only
        gradient buffers of stage 3 are moved."""
        self.engine, self.on_host = engine, on_host
        self.is_offloaded = False
        self._offloaded: list[tuple[Tensor, torch.Size, list[Tensor]]] = []
        self._host: dict[tuple[int, str], list[Tensor]] = {}

    def offload(self) -> None:
        """Copies the state to host memory and empties the original tensors. This happens on CPUs, too, so
        that any use before `reload` fails on every device."""
        if self.is_offloaded:
            return
        self.is_offloaded = True
        self._clear_scratch()
        if self._at_stage_3:
            self.engine.offload_states(include=GRADIENTS)
        elif not self.on_host:
            self.engine.optimizer._clear_hp_buffer_references()
        for key, tensor in ({} if self.on_host else self._tensors()).items():
            pieces = tensor.detach().view(-1).split(PIECE)
            if key not in self._host:
                about = {"device": "cpu", "pin_memory": DEVICE_TYPE == "cuda"}
                self._host[key] = [torch.empty_like(piece, **about) for piece in pieces]
            for piece, copy in zip(pieces, self._host[key], strict=True):
                copy.copy_(piece, non_blocking=True)
            self._offloaded.append((tensor, tensor.shape, self._host[key]))
            tensor.data = tensor.new_empty(0)  # safe: later work in the same stream reuses its memory

    def reload(self) -> None:
        """Copies the state back to the device, equal to the last bit."""
        if not self.is_offloaded:
            return
        self.is_offloaded = False
        for tensor, shape, copies in self._offloaded:
            whole = tensor.new_empty(shape)
            for piece, copy in zip(whole.view(-1).split(PIECE), copies, strict=True):
                piece.copy_(copy, non_blocking=True)
            tensor.data = whole
        self._offloaded.clear()
        if self._at_stage_3:
            self.engine.reload_states()
        elif not self.on_host:
            self.engine.optimizer._link_all_hp_params()
            self.engine.optimizer._hp_optimizer_states_linked = False  # the next step links them

    @property
    def _at_stage_3(self) -> bool:
        return isinstance(self.engine.optimizer, DeepSpeedZeroOptimizer_Stage3)

    def _clear_scratch(self) -> None:
        """Clears buffers that Muon overwrites before it reads them: gather buffers and, at stages 1 and 2,
        the pending momentum of a step that may still be skipped."""
        zero = self.engine.optimizer
        zero._clear_muon_allgather_buffers()
        if not self._at_stage_3:
            zero._muon_pending_momentum.clear()

    def _tensors(self) -> dict[tuple[int, str], Tensor]:
        """Returns master weights and optimizer states by (group, name). Before the optimizer's first step
        there are only master weights."""
        zero = self.engine.optimizer
        masters = (
            zero.fp32_partitioned_groups_flat if self._at_stage_3 else zero.single_partition_of_fp32_groups
        )
        found = {}
        for i, master in enumerate(masters):
            found[i, "master"] = master
            state = zero.optimizer.state.get(master, {})
            found |= {(i, name): value for name, value in state.items() if isinstance(value, Tensor)}
        return found
