"""Trained and frozen models on PyTorch alone.

On one rank in float32 the model is an ordinary module. Otherwise `fully_shard`
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) keeps a shard of every parameter on
each rank and gathers a layer's parameters while the layer computes. In bf16 the shards are float32 master
weights, and layers compute with weights that are rounded to bf16.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from openrlhf.backends.base import Objective, Part, RowT
from openrlhf.backends.model_rank import (
    BUCKET_BYTES,
    FrozenRank,
    ModelRank,
    TrainedRank,
    decay_groups,
    held,
    without_states,
)
from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.dcp import METADATA, TorchReader, load_tensors, save_tensors
from openrlhf.checkpoint.pickles import check_same_model
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.backbone import RowModel
from openrlhf.models.configurations import DTYPES
from openrlhf.models.tensor_parallel import whole
from openrlhf.types import Metrics

PROGRESS = "progress.pt"
"""File with the number of optimizer steps and the trainer's state."""
WEIGHTS = "weights"
"""Prefix of the names of weights in a checkpoint. The prefix of AdamW's states is their key, such as
exp_avg."""


class TorchEngine(TrainedRank):
    """One rank of a model in training. Call `init_distributed` first. config/checks.py rejects options that
    this engine does not support."""

    backend = "torch"

    def _build(self, build_model: Callable[[], RowModel], ema_beta: float | None) -> None:
        assert not self.reentrant and ema_beta is None  # config/checks.py rejects them
        ds, self.dtype = self.ds, DTYPES[self.ds.param_dtype]
        self.is_sharded = self.mesh.size > 1 or ds.param_dtype != "fp32"
        self._module = build_model()
        self._prepare_layers(self._module)
        for p in self._module.parameters():
            if p.requires_grad:
                p.data = p.data.float()
        place(self, self._module, ds, shard=self.is_sharded)
        self.trained = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        trained = self.trained.values()
        self.optimizer = _adamw(self._module, self.optim) if self.learns else without_states(trained)
        self._is_offloaded, self._steps = False, 0

    @property
    def module(self) -> RowModel:
        return self._module

    @property
    def steps(self) -> int:
        return self._steps

    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        answers = super().forward(rows, read)
        reshard(self._module)
        return answers

    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        metrics = super().evaluate(rows, objective)
        reshard(self._module)
        return metrics

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _step(self) -> tuple[float, float]:
        norm = whole(get_total_norm([p.grad for p in self.trained.values() if p.grad is not None]))
        if self.optim.max_norm > 0:
            clip_grads_with_norm_(self.trained.values(), self.optim.max_norm, norm)
        lr = self.optim.adam.lr * self.schedule(self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        return lr, float(norm)

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors().items():
            if not name.startswith(f"{WEIGHTS}."):
                yield name, held(tensor)

    def weights(
        self, bucket_bytes: int = BUCKET_BYTES, part: Part = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, unsharded tensor) in the dtype with which the model computes."""
        for name, tensor in super().weights(bucket_bytes, part):
            yield name, self._rounded(tensor)

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [
            (name, self.dtype if dtype.is_floating_point else dtype, shape)
            for name, dtype, shape in super().weight_metadata(part)
        ]

    def _trained_in_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super()._trained_in_full():
            yield name, self._rounded(tensor)

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _write_states(self, writer: CheckpointWriter, state: dict) -> None:
        path = writer.folder
        if self.mesh.is_first:
            writer.save({"steps": self._steps, "state": state}, path / PROGRESS)
        save_tensors(writer, self._tensors())

    def _read_states(self, folder: Path) -> dict:
        """Reads a checkpoint. Raises UsageError for one of another backend or another model."""
        if not (folder / METADATA).exists():
            text = "was not saved with --train.backend torch.\nResume with --train.backend deepspeed."
            raise UsageError(
                ErrorCode.OTHER_RUN, f"{folder.name} {text}", flag="--ckpt.path", value=folder.parent
            )
        tensors = self._tensors()
        known = TorchReader(folder).read_metadata().state_dict_metadata.keys()
        if not self.learns:
            known = {name for name in known if name.startswith(f"{WEIGHTS}.")}
        check_same_model(known - tensors.keys(), tensors.keys() - known)
        load_tensors(folder, tensors)
        progress = pickles.load(folder / PROGRESS)
        self._steps = progress["steps"]
        return progress["state"]

    def _tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that optimizer steps change, by name: weights and AdamW's states. Loading a
        checkpoint fills them in place."""
        found = {}
        for name, p in self.trained.items():
            found[f"{WEIGHTS}.{name}"] = p.detach()
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state[p].items()}
        return found

    @property
    def is_offloaded(self) -> bool:
        return self._is_offloaded

    def offload(self) -> None:
        # The float32 weights stay, because forward passes and weight syncs read them.
        self._is_offloaded = True
        self._move_states(torch.device("cpu"))

    def reload(self) -> None:
        self._is_offloaded = False
        self._move_states(self.device)

    def _move_states(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            state.update({key: value.to(device) for key, value in state.items()})


class TorchFrozen(FrozenRank):
    """One rank of a model that is not trained. With --ds.zero_stage 3 and several ranks it is sharded;
    otherwise every rank has a copy."""

    def _build(self, build_model: Callable[[], RowModel], ds: DeepSpeedConfig, offload: bool) -> None:
        assert not offload  # config/checks.py rejects it
        self._module = build_model().eval().requires_grad_(False)
        place(self, self._module, ds, shard=self.mesh.size > 1 and ds.zero_stage == 3)

    @property
    def module(self) -> RowModel:
        return self._module

    def whole(self, parameter: Tensor) -> Tensor:
        return whole(parameter)


def place(rank: ModelRank, module: RowModel, ds: DeepSpeedConfig, *, shard: bool) -> None:
    """Places a model on the ranks of the mesh and selects how it reads rows. With `shard` it is sharded layer
    by layer: a layer is gathered while it computes; with --ds.zero_stage 2 it stays gathered until its
    backward pass ends."""
    if shard:
        options: dict[str, Any] = {
            "mesh": init_device_mesh(DEVICE_TYPE, (rank.mesh.size,)),
            "reshard_after_forward": ds.zero_stage == 3,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[ds.param_dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        }
        for layer in reversed([m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]):
            fully_shard(layer, **options)
        fully_shard(module, **options)
    else:
        module.to(rank.device)
    rank.set_up_rows(module, module, ds, zero_stage=3 if shard else None)
    reshard(module)


def reshard(module: RowModel) -> None:
    """Shards all layers again. Passes without a backward pass leave them gathered with --ds.zero_stage 2."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _adamw(module: RowModel, optim: OptimConfig) -> torch.optim.AdamW:
    """Builds AdamW, without weight decay for biases, norms and other vectors. Its states are created before
    the first step, so that a checkpoint can be loaded into them."""
    adam = optim.adam
    groups = decay_groups(module, adam.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=True)
    for group in groups:
        for p in group["params"]:
            zeros = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | zeros
    return optimizer
