"""Checkpoints for another number of ranks, or another ZeRO stage, than they were saved with.

DeepSpeed gives each rank the file back that the same rank wrote. Here the files of all ranks are read by
parameter, and each rank puts together the states that it would have saved, which DeepSpeed then loads. Files
are mapped into memory: of each, a rank reads what it needs.

The universal form of a checkpoint (https://arxiv.org/abs/2406.18820) is read too, which DeepSpeed's
`ds_to_universal` writes. DeepSpeed's own loader of it gives, at stage 3, every parameter the weight decay of
the first group.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from openrlhf.backends.model_rank import check_same_model

MASTER = "fp32"
"""Of a parameter's vectors the weights that the optimizer steps on; the others are the optimizer's own."""
MOMENTUM = "momentum_buffer"
"""Of Muon. At stages 1 and 2 a rank has it of the whole of every matrix of which it has a part."""
ORDER = "parameters_in_order"
"""In the client state: names of all trained parameters as the optimizer counts them, which at stage 0 stores
no names. Muon sorts them by size, where at stage 3 they have none."""
LOSS_SCALE = ("loss_scaler", "dynamic_loss_scale", "overflow")


class Fragment(NamedTuple):
    """Elements `start` to `start + numel` of a flattened parameter."""

    start: int
    numel: int
    vectors: Mapping[str, Tensor]
    """Each (numel,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStates:
    """Master weights and optimizer states of a checkpoint, by parameter."""

    fragments: dict[str, list[Fragment]] = field(default_factory=dict)
    """Of each parameter, in order and without gaps."""
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the optimizer keeps of a parameter beside vectors: the number of its steps."""
    loss_scale: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, numel: int, vectors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """The next elements of a parameter."""
        self.fragments.setdefault(name, []).append(Fragment(self.numel(name), numel, vectors))
        self.scalars[name] = dict(scalars)

    def numel(self, name: str) -> int:
        """Elements of a parameter that are known."""
        known = self.fragments.get(name)
        return known[-1].start + known[-1].numel if known else 0

    def keys(self, names: Collection[str]) -> set[str]:
        """Of the optimizer's vectors; none before its first step."""
        return {key for name in names for key in self.fragments[name][0].vectors} - {MASTER}

    def read(self, name: str, key: str, start: int, numel: int) -> Tensor:
        """(numel,) of a parameter; zero, as before its first step, where the optimizer has nothing of it."""
        parts = [torch.zeros(0)]
        for fragment in self.fragments[name]:
            begin = max(start, fragment.start)
            end = min(start + numel, fragment.start + fragment.numel)
            if begin < end:
                vector = fragment.vectors.get(key, torch.zeros(fragment.numel))
                parts.append(vector[begin - fragment.start : end - fragment.start])
        return torch.cat(parts)


class Piece(NamedTuple):
    """Elements of a flattened parameter in a flat tensor of this rank."""

    name: str
    start: int
    numel: int
    place: int
    """Of the first of them in the flat tensor."""


class ParameterGroup(NamedTuple):
    """Parameters that share a tensor on each rank, in which a rank has pieces of some."""

    master: Tensor
    names: list[str]
    pieces: list[Piece]
    has_whole_momentum: bool = False


class Checkpoint:
    """A folder that DeepSpeed's engines wrote, or its converter. `tensor_rank`: whose files are read."""

    def __init__(self, folder: str | Path, tensor_rank: int = 0) -> None:
        self.folder, self.tensor_rank = Path(folder), tensor_rank
        self.is_universal = (self.folder / "zero").is_dir()
        self.shards = self._of_ranks("optim_states")

    def fits(self, stage: int, num_ranks: int) -> bool:
        """Can each rank have its own file back?"""
        if self.is_universal or stage != self.stage:
            return False
        return stage == 0 or num_ranks == len(self.shards)

    @property
    def stage(self) -> int:
        """0 where no rank has parts of its own."""
        return int(_states_of(self.shards[0]).get("zero_stage", 1)) if self.shards else 0

    def model_states(self) -> dict[str, Any]:
        """What all ranks have in common. At stage 3 without weights. ValueError where there is none."""
        whole = self.folder / f"mp_rank_{self.tensor_rank:02d}_model_states.pt"
        for file in (whole, *self._of_ranks("model_states")):
            if file.exists():
                return _load(file)
        raise ValueError(f"--ckpt.path: {self.folder} could not be loaded: no *_model_states.pt is there")

    def states(self, names: Sequence[str]) -> SavedStates:
        """`names`: of all trained parameters. ValueError where the checkpoint is of others."""
        model_states = self.model_states()
        shapes = model_states["param_shapes"]
        known = set(model_states["module"]) if shapes is None else {n for group in shapes for n in group}
        # Without shapes all of a module is known, with buffers and the second names of tied weights.
        check_same_model(known - set(names) if shapes else (), set(names) - known)
        if self.is_universal:
            return self._universal(names)
        if not self.shards:
            return _of_whole(model_states.get(ORDER, names), model_states)
        self._check_complete(model_states["dp_world_size"])
        saved = SavedStates()
        for rank, shard in enumerate(self.shards):
            states = _states_of(shard)
            saved.loss_scale.update(_picked(states, LOSS_SCALE))
            if "fp32_flat_groups" in states:
                _add_slices(saved, states, shapes, rank, len(self.shards))
            else:
                _add_mapped(saved, states, shapes)
        return saved

    def _check_complete(self, num_ranks: int) -> None:
        if len(self.shards) != num_ranks:
            raise ValueError(
                f"--ckpt.path: {num_ranks} ranks saved {self.folder}, and the optimizer states of "
                f"{len(self.shards)} are there.\nCopy the missing *_optim_states.pt, or resume from another "
                "checkpoint: write its name into the file `latest` beside it."
            )

    def _universal(self, names: Sequence[str]) -> SavedStates:
        """A folder for each parameter, in it a file for each vector, whole."""
        common = _load(self.folder / "zero" / "optimizer_state.pt")
        saved = SavedStates(loss_scale=_picked(common, LOSS_SCALE))
        of_group = common.get("optimizer_state_dict", {}).get("state", {}).get(0, {})  # at stage 3
        for name in names:
            files = {file.stem: _load(file) for file in (self.folder / "zero" / name).glob("*.pt")}
            steps = _picked(of_group, ("step",)) | {key: files.pop(key) for key in ("step",) if key in files}
            whole = {key: file["param"] if isinstance(file, dict) else file for key, file in files.items()}
            saved.add(name, whole[MASTER].numel(), _vectors(whole), steps)
        return saved

    def _of_ranks(self, what: str) -> list[Path]:
        """The files of data-parallel ranks, in order."""
        pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{self.tensor_rank:02d}_{what}\.pt")
        files = self.folder.glob("*.pt")
        of_rank = {int(match[1]): file for file in files if (match := pattern.fullmatch(file.name))}
        return [of_rank[rank] for rank in sorted(of_rank)]


def slice_of(numel: int, rank: int, size: int) -> range:
    """The elements that one of `size` ranks has where a parameter is cut into equal parts; the last ones may
    have fewer, or none."""
    part = -(-numel // size)
    return range(min(rank * part, numel), min((rank + 1) * part, numel))


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def _states_of(shard: Path) -> dict[str, Any]:
    return _load(shard)["optimizer_state_dict"]


def _picked(mapping: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if key in mapping}


def _vectors(states: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: v.flatten() for key, v in states.items() if isinstance(v, Tensor) and v.ndim > 0}


def _scalars(states: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in states.items() if not isinstance(v, Tensor) or v.ndim == 0}


def _add_mapped(saved: SavedStates, states: dict[str, Any], shapes: Sequence[Mapping]) -> None:
    """Stages 1 and 2: a rank has an equal part of a group, wherever parameters begin and end in it."""
    for i, master in enumerate(states["single_partition_of_fp32_groups"]):
        of_group = states["base_optimizer_state"]["state"].get(i, {})
        vectors, place = _vectors(of_group) | {MASTER: master}, 0
        momentum = vectors.pop(MOMENTUM, None)
        for name, address in states["param_slice_mappings"][i].items():
            parts = {key: v[address.start :][: address.numel] for key, v in vectors.items()}
            if momentum is not None:
                parts[MOMENTUM] = momentum[place + saved.numel(name) :][: address.numel]
            saved.add(name, address.numel, parts, _scalars(of_group))
            place += shapes[i][name].numel()


def _add_slices(saved: SavedStates, states: dict, shapes: Sequence[Mapping], rank: int, size: int) -> None:
    """Stage 3: a rank has an equal part of each parameter, padded to the size of the first."""
    for i, master in enumerate(states["fp32_flat_groups"]):
        of_group = states["optimizer_state_dict"]["state"].get(i, {})
        vectors, place = _vectors(of_group) | {MASTER: master}, 0
        for name, shape in shapes[i].items():
            numel = len(slice_of(shape.numel(), rank, size))
            parts = {key: v[place:][:numel] for key, v in vectors.items()}
            saved.add(name, numel, parts, _scalars(of_group))
            place += len(slice_of(shape.numel(), 0, size))


def _of_whole(names: Sequence[str], model_states: dict[str, Any]) -> SavedStates:
    """Stage 0: every rank has everything, and the first has written it."""
    optimizer, saved = model_states["optimizer"], SavedStates()
    masters = [model_states["module"][name] for name in names]
    if "fp32_groups" in optimizer:  # in half precision
        masters = [master for group in optimizer["fp32_groups"] for master in group]
        optimizer = optimizer["optimizer_state_dict"]
    for i, (name, master) in enumerate(zip(names, masters, strict=True)):
        states = optimizer["state"].get(i, {})
        saved.add(name, master.numel(), _vectors(states | {MASTER: master}), _scalars(states))
    return saved


def names_in_order(engine: Any) -> list[str]:
    """Of all parameters that a DeepSpeed engine trains."""
    return [name for group in _groups_of(engine) for name in group.names]


@torch.no_grad()
def load_resharded(engine: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Give a DeepSpeed engine everything that a checkpoint has, whatever ranks saved it, and return what else
    is in it. All ranks together. ValueError where it is of another model."""
    saved = checkpoint.states(names_in_order(engine))
    model_states = checkpoint.model_states()
    _load_optimizer(engine.optimizer, list(_groups_of(engine)), saved)
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() & model_states["module"].keys():
        buffers[name].copy_(model_states["module"][name])
    engine.lr_scheduler.load_state_dict(model_states["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, model_states[counter])
    return model_states


def _load_optimizer(optimizer: Any, groups: Sequence[ParameterGroup], saved: SavedStates) -> None:
    masters = [_put_together(saved, group, MASTER) for group in groups]
    states = {i: state for i, group in enumerate(groups) if (state := _state_of(saved, group))}
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        own: dict[str, Any] = optimizer.state_dict() | saved.loss_scale | {"fp32_flat_groups": masters}
        own["optimizer_state_dict"] |= {"state": states}
        optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict([own] * dist.get_world_size(optimizer.dp_process_group))
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):
        own = optimizer.state_dict() | saved.loss_scale | {"single_partition_of_fp32_groups": masters}
        own["base_optimizer_state"] |= {"state": states}
        size = dist.get_world_size(optimizer.dp_process_group)
        optimizer.load_state_dict([own] * size, load_from_fp32_weights=True)
        optimizer.update_lp_params()
    else:
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.load_state_dict(inner.state_dict() | {"state": states})
        for (param, stepped_on), master in zip(_whole(optimizer), masters, strict=True):
            stepped_on.copy_(master)
            param.copy_(master)


def _state_of(saved: SavedStates, group: ParameterGroup) -> dict[str, Any]:
    """Empty before the optimizer's first step."""
    vectors = {key: _put_together(saved, group, key) for key in saved.keys(group.names)}
    scalars = next((found for name in group.names if (found := saved.scalars[name])), {})
    return vectors | deepcopy(scalars) if vectors else {}  # of a group's parameters each counts by itself


def _put_together(saved: SavedStates, group: ParameterGroup, key: str) -> Tensor:
    """In the shape that the optimizer keeps of it."""
    if key == MOMENTUM and group.has_whole_momentum:
        whole = [saved.read(piece.name, key, 0, saved.numel(piece.name)) for piece in group.pieces]
        return torch.cat([torch.zeros(0), *whole])
    values = torch.zeros(group.master.numel())
    for name, start, numel, place in group.pieces:
        values[place : place + numel] = saved.read(name, key, start, numel)
    return values.view(group.master.shape)


def _groups_of(engine: Any) -> Iterator[ParameterGroup]:
    """The tensors that the engine's optimizer steps on, in its order."""
    optimizer, name_of = engine.optimizer, engine.param_names
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for master, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            names = [name_of[param] for param in params]
            yield ParameterGroup(master, names, list(_slices(names, params, optimizer.dp_process_group)))
    elif hasattr(optimizer, "update_lp_params"):
        if isinstance(optimizer, BF16_Optimizer):
            masters, grouped = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        else:
            masters, grouped = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups
        for master, params in zip(masters, grouped, strict=True):
            names = [name_of[param] for param in params]
            yield ParameterGroup(master, names, list(_mapped(names, params)), has_whole_momentum=True)
    else:
        for param, stepped_on in _whole(optimizer):
            name = name_of[param]
            yield ParameterGroup(stepped_on, [name], [Piece(name, 0, stepped_on.numel(), 0)])


def _slices(names: Sequence[str], params: Sequence[Any], ranks: Any) -> Iterator[Piece]:
    place = 0
    for name, param in zip(names, params, strict=True):
        mine = slice_of(param.ds_numel, dist.get_rank(ranks), dist.get_world_size(ranks))
        yield Piece(name, mine.start, len(mine), place)
        place += param.partition_numel()


def _mapped(names: Sequence[str], params: Sequence[Any]) -> Iterator[Piece]:
    for name, param in zip(names, params, strict=True):
        if (mapping := param._hp_mapping) is not None:
            of_param, of_master = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Piece(name, of_param.start, of_param.numel, of_master.start)


def _whole(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, what is stepped on in its place)."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(params, masters, strict=True)
    else:
        yield from ((param, param) for group in optimizer.param_groups for param in group["params"])
