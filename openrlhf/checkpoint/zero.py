"""The files of DeepSpeed's checkpoints: writes them, and loads those of any number of ranks and any ZeRO
stage.

DeepSpeed itself can only load on each rank the file that the same rank wrote. This module reads the files of
all ranks, parameter by parameter. Each rank assembles the states that it would have saved itself, and
DeepSpeed loads these. Files are memory-mapped, and a rank reads only the parts that it needs.

The module also reads universal checkpoints (https://arxiv.org/abs/2406.18820), which DeepSpeed's
`ds_to_universal` writes, because DeepSpeed's own loader applies the weight decay of the first parameter group
to all parameters at stage 3.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.pickles import check_same_model
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.errors import ErrorCode, UsageError

MASTER = "fp32"
"""Key of the master weights among a parameter's vectors. The other vectors are optimizer states."""
MOMENTUM = "momentum_buffer"
"""Key of Muon's momentum. At stages 1 and 2 a rank has the full momentum of every matrix of which it has a
part."""
ORDER = "parameters_in_order"
"""Key in the client state for the names of all trained parameters in the optimizer's order, because at stage
0 the optimizer stores no names. Muon sorts parameters by size, which is 0 for all at stage 3."""
DEEPSPEED = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""DeepSpeed's own types in its checkpoint files."""
LOSS_SCALE = ("loss_scaler", "dynamic_loss_scale", "overflow")
LOSS_SCALE_OF_STAGE_0 = ("cur_scale", "cur_iter", "last_overflow_iter")


class DeepSpeedFiles(TorchCheckpointEngine):
    """A DeepSpeed checkpoint engine that passes every file to `writer`, which is set anew for each save. This
    module reads the files."""

    writer: CheckpointWriter

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Makes an engine save through the returned object. Rank 0's copy of DeepSpeed's recovery script goes
        through the writer, too: it lies between collectives, so that a failure must not raise before
        `CheckpointWriter.finish`."""
        files = engine.checkpoint_engine = cls()
        copy = engine._copy_recovery_script
        engine._copy_recovery_script = lambda folder: files.writer.attempt(folder, lambda: copy(folder))
        return files

    def save(self, state_dict: Any, path: str) -> None:
        self.writer.save(state_dict, path)


class Fragment(NamedTuple):
    """Elements `start` to `start + numel` of a flattened parameter."""

    start: int
    numel: int
    vectors: Mapping[str, Tensor]
    """Master weights and optimizer states of these elements, each (numel,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStates:
    """Master weights and optimizer states of a checkpoint, by parameter."""

    fragments: dict[str, list[Fragment]] = field(default_factory=dict)
    """The fragments of each parameter, in order and without gaps."""
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Scalar optimizer states of each parameter, such as the number of steps."""
    loss_scale: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, numel: int, vectors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Appends the next `numel` elements of a parameter."""
        self.fragments.setdefault(name, []).append(Fragment(self.numel(name), numel, vectors))
        self.scalars[name] = dict(scalars)

    def numel(self, name: str) -> int:
        """Returns the number of elements of a parameter added so far."""
        known = self.fragments.get(name)
        return known[-1].start + known[-1].numel if known else 0

    def keys(self, names: Collection[str]) -> set[str]:
        """Returns the keys of the parameters' optimizer states; empty before the optimizer's first step."""
        return {key for name in names for key in self.fragments[name][0].vectors} - {MASTER}

    def read(self, name: str, key: str, start: int, numel: int) -> Tensor:
        """Returns elements `start` to `start + numel` of a parameter's vector, (numel,). Elements without a
        saved state are zero, as before the optimizer's first step."""
        parts = [torch.zeros(0)]
        for fragment in self.fragments[name]:
            begin = max(start, fragment.start)
            end = min(start + numel, fragment.start + fragment.numel)
            if begin < end:
                if (vector := fragment.vectors.get(key)) is None:
                    parts.append(torch.zeros(end - begin))
                else:
                    parts.append(vector[begin - fragment.start : end - fragment.start])
        return torch.cat(parts)


class Piece(NamedTuple):
    """Elements `start` to `start + numel` of a flattened parameter, and their place in this rank's flat
    tensor."""

    name: str
    start: int
    numel: int
    place: int
    """Index of the first element in the flat tensor."""


class ParameterGroup(NamedTuple):
    """Parameters that share one flat tensor on each rank, in which a rank has pieces of some of them."""

    master: Tensor
    names: list[str]
    pieces: list[Piece]
    has_whole_momentum: bool = False
    """True if Muon's momentum covers whole parameters, not only the pieces."""


class Checkpoint:
    """A checkpoint folder that DeepSpeed's engines or its universal converter wrote. `tensor_rank`: the
    tensor-parallel rank whose files are read."""

    def __init__(self, folder: str | Path, tensor_rank: int = 0) -> None:
        self.folder, self.tensor_rank = Path(folder), tensor_rank
        self.is_universal = (self.folder / "zero").is_dir()
        self.shards = self._list_rank_files("optim_states")

    def model_states(self) -> dict[str, Any]:
        """Returns the state that all ranks share, at stage 3 without weights. Raises UsageError if its file
        is missing."""
        whole = self.folder / f"mp_rank_{self.tensor_rank:02d}_model_states.pt"
        for file in (whole, *self._list_rank_files("model_states")):
            if file.exists():
                return _load(file)
        raise self._damaged("the file *_model_states.pt is missing.\nResume from another checkpoint")

    def states(self, names: Sequence[str]) -> SavedStates:
        """Reads master weights and optimizer states. `names`: all trained parameters. Raises UsageError if
        the checkpoint has other parameters, or if files of some ranks are missing."""
        model_states = self.model_states()
        shapes = model_states["param_shapes"]
        known = set(model_states["module"]) if shapes is None else {n for group in shapes for n in group}
        # Without shapes, `known` also has buffers and the second names of tied weights.
        check_same_model(known - set(names) if shapes else (), set(names) - known)
        if self.is_universal:
            return self._universal(names)
        if not self.shards:
            return _states_of_stage_0(model_states.get(ORDER, names), model_states)
        self._check_complete(model_states["dp_world_size"])
        saved = SavedStates()
        for rank, shard in enumerate(self.shards):
            states = _load(shard)["optimizer_state_dict"]
            saved.loss_scale.update(_selected(states, LOSS_SCALE))
            if "fp32_flat_groups" in states:
                _add_stage_3(saved, states, shapes, rank, len(self.shards))
            else:
                _add_stage_1_or_2(saved, states, shapes)
        return saved

    def _check_complete(self, num_ranks: int) -> None:
        if len(self.shards) != num_ranks:
            raise self._damaged(
                f"{num_ranks} ranks saved this checkpoint, but it has the optimizer states of "
                f"{len(self.shards)}.\nCopy missing *_optim_states.pt into it, move those of others away, or "
                "resume from another checkpoint"
            )

    def _damaged(self, text: str) -> UsageError:
        text += ": write its name into the file `latest` beside it."
        return UsageError(ErrorCode.DAMAGED_CHECKPOINT, text, flag="--ckpt.path", value=self.folder)

    def _universal(self, names: Sequence[str]) -> SavedStates:
        """Reads a universal checkpoint, which has a folder for each parameter with a file for each of its
        full vectors."""
        common = _load(self.folder / "zero" / "optimizer_state.pt")
        saved = SavedStates(loss_scale=_selected(common, LOSS_SCALE))
        of_group = common.get("optimizer_state_dict", {}).get("state", {}).get(0, {})  # at stage 3
        for name in names:
            files = {file.stem: _load(file) for file in (self.folder / "zero" / name).glob("*.pt")}
            steps = _selected(of_group, ("step",)) | {
                key: files.pop(key) for key in ("step",) if key in files
            }
            whole = {key: file["param"] if isinstance(file, dict) else file for key, file in files.items()}
            saved.add(name, whole[MASTER].numel(), _vectors(whole), steps)
        return saved

    def _list_rank_files(self, what: str) -> list[Path]:
        """Returns the files named `what` of the data-parallel ranks, in order."""
        pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{self.tensor_rank:02d}_{what}\.pt")
        files = self.folder.glob("*.pt")
        of_rank = {int(match[1]): file for file in files if (match := pattern.fullmatch(file.name))}
        return [of_rank[rank] for rank in sorted(of_rank)]


def find_slice(numel: int, rank: int, size: int) -> range:
    """Returns the range of elements of rank `rank` if a parameter is split equally among `size` ranks. The
    last ranks may have fewer elements, or none."""
    part = -(-numel // size)
    return range(min(rank * part, numel), min((rank + 1) * part, numel))


def _load(file: Path) -> Any:
    return pickles.load(file, DEEPSPEED, mmap=True)


def _selected(mapping: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if key in mapping}


def _vectors(states: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: v.flatten() for key, v in states.items() if isinstance(v, Tensor) and v.ndim > 0}


def _scalars(states: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in states.items() if not isinstance(v, Tensor) or v.ndim == 0}


def _add_stage_1_or_2(saved: SavedStates, states: dict[str, Any], shapes: Sequence[Mapping]) -> None:
    """Adds one rank's states of stage 1 or 2: an equal part of each flat group. Its borders may lie inside
    parameters."""
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


def _add_stage_3(saved: SavedStates, states: dict, shapes: Sequence[Mapping], rank: int, size: int) -> None:
    """Adds one rank's states of stage 3: an equal part of each parameter, padded to the size of the first
    rank's part."""
    for i, master in enumerate(states["fp32_flat_groups"]):
        of_group = states["optimizer_state_dict"]["state"].get(i, {})
        vectors, place = _vectors(of_group) | {MASTER: master}, 0
        for name, shape in shapes[i].items():
            numel = len(find_slice(shape.numel(), rank, size))
            parts = {key: v[place:][:numel] for key, v in vectors.items()}
            saved.add(name, numel, parts, _scalars(of_group))
            place += len(find_slice(shape.numel(), 0, size))


def _states_of_stage_0(names: Sequence[str], model_states: dict[str, Any]) -> SavedStates:
    """Reads the states of stage 0, which every rank has and the first rank writes."""
    optimizer, saved = model_states["optimizer"], SavedStates()
    masters = [model_states["module"][name] for name in names]
    if "fp32_groups" in optimizer:  # half precision has float32 master weights
        masters = [master for group in optimizer["fp32_groups"] for master in group]
        saved.loss_scale.update(_selected(optimizer, LOSS_SCALE_OF_STAGE_0))
        optimizer = optimizer["optimizer_state_dict"]
    for i, (name, master) in enumerate(zip(names, masters, strict=True)):
        states = optimizer["state"].get(i, {})
        saved.add(name, master.numel(), _vectors(states | {MASTER: master}), _scalars(states))
    return saved


def names_in_order(engine: Any) -> list[str]:
    """Returns the names of all parameters that a DeepSpeed engine trains, in its optimizer's order."""
    return [name for group in _list_groups(engine) for name in group.names]


def stepped_tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of this rank's master weights and optimizer states, without padding."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in _list_groups(engine):
        for key, vector in _vectors(inner.state.get(group.master, {}) | {MASTER: group.master}).items():
            if len(vector) == group.master.numel():
                for piece in group.pieces:
                    yield f"{piece.name} ({key})", vector[piece.place : piece.place + piece.numel]
            else:  # Muon's momentum of whole matrices
                yield key, vector


@torch.no_grad()
def load_states(engine: Any, checkpoint: Checkpoint, *, of_optimizer: bool = True) -> dict[str, Any]:
    """Loads a checkpoint, which any number of ranks may have saved, into a DeepSpeed engine; without
    `of_optimizer` its weights alone. Returns the state that all ranks share. Collective. Raises UsageError if
    the checkpoint is of another model."""
    model_states = checkpoint.model_states()
    check_same_model(model_states["module"].keys() - engine.module.state_dict().keys(), ())
    saved = checkpoint.states(names_in_order(engine))
    sizes = {name: getattr(p, "ds_numel", p.numel()) for p, name in engine.param_names.items()}
    others = (f"{name} of this size" for name in saved.fragments if saved.numel(name) != sizes[name])
    check_same_model((), others)
    _load_optimizer(engine.optimizer, list(_list_groups(engine)), saved, of_optimizer)
    buffers = dict(engine.module.named_buffers())
    for name in buffers.keys() & model_states["module"].keys():
        buffers[name].copy_(model_states["module"][name])
    engine.lr_scheduler.load_state_dict(model_states["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, model_states[counter])
    return model_states


def _load_optimizer(
    optimizer: Any, groups: Sequence[ParameterGroup], saved: SavedStates, with_states: bool
) -> None:
    masters = [_assembled(saved, group, MASTER) for group in groups]
    states = {
        i: state for i, group in enumerate(groups) if with_states and (state := _get_state(saved, group))
    }
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
        for (param, stepped_on), master in zip(_unsharded(optimizer), masters, strict=True):
            stepped_on.copy_(master)
            param.copy_(master)
        if config := getattr(optimizer, "loss_scale_config", None):
            vars(config).update(_selected(saved.loss_scale, LOSS_SCALE_OF_STAGE_0))


def _get_state(saved: SavedStates, group: ParameterGroup) -> dict[str, Any]:
    """Returns a group's optimizer states; empty before the optimizer's first step."""
    vectors = {key: _assembled(saved, group, key) for key in saved.keys(group.names)}
    scalars = next((found for name in group.names if (found := saved.scalars[name])), {})
    return vectors | deepcopy(scalars) if vectors else {}  # each group gets its own step counter


def _assembled(saved: SavedStates, group: ParameterGroup, key: str) -> Tensor:
    """Assembles this rank's vector `key` of a group in the optimizer's shape."""
    if key == MOMENTUM and group.has_whole_momentum:
        whole = [saved.read(piece.name, key, 0, saved.numel(piece.name)) for piece in group.pieces]
        return torch.cat([torch.zeros(0), *whole])
    values = torch.zeros(group.master.numel())
    for name, start, numel, place in group.pieces:
        values[place : place + numel] = saved.read(name, key, start, numel)
    return values.view(group.master.shape)


def _list_groups(engine: Any) -> Iterator[ParameterGroup]:
    """Yields the optimizer's groups of parameters, in its order."""
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
        for param, stepped_on in _unsharded(optimizer):
            name = name_of[param]
            yield ParameterGroup(stepped_on, [name], [Piece(name, 0, stepped_on.numel(), 0)])


def _slices(names: Sequence[str], params: Sequence[Any], ranks: Any) -> Iterator[Piece]:
    place = 0
    for name, param in zip(names, params, strict=True):
        mine = find_slice(param.ds_numel, dist.get_rank(ranks), dist.get_world_size(ranks))
        yield Piece(name, mine.start, len(mine), place)
        place += param.partition_numel()


def _mapped(names: Sequence[str], params: Sequence[Any]) -> Iterator[Piece]:
    for name, param in zip(names, params, strict=True):
        if (mapping := param._hp_mapping) is not None:
            of_param, of_master = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Piece(name, of_param.start, of_param.numel, of_master.start)


def _unsharded(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields (parameter, tensor that the optimizer updates): the master weight if there is one, else the
    parameter."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(params, masters, strict=True)
    else:
        yield from ((param, param) for group in optimizer.param_groups for param in group["params"])
