"""Shards of saved ranks are assembled to the shards of other ranks."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from refusals import refused
from torch import nn

from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.checkpoint.zero import (
    MASTER,
    Checkpoint,
    Piece,
    SavedStates,
    _list_groups,
    _load_optimizer,
    _states_of_stage_0,
    check_same_model,
    find_slice,
    names_in_order,
    stepped_tensors,
)
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh

SIZES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 40])
def test_slices_are_equal_parts_of_the_whole(numel: int) -> None:
    for size in SIZES:
        parts = [find_slice(numel, rank, size) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(numel))
        assert {len(part) for part in parts if part.stop < numel} <= {len(parts[0])}


def saved_of(values: torch.Tensor, cuts: tuple[int, ...]) -> SavedStates:
    """Returns a parameter, cut at these elements; in its first part the optimizer has made no step."""
    saved = SavedStates()
    for i, part in enumerate(torch.tensor_split(values, cuts)):
        saved.add("w", len(part), {MASTER: part} | ({"exp_avg": -part} if i else {}), {"step": 3})
    return saved


@pytest.mark.parametrize("cuts", [(), (4,), (1, 1, 6)])
def test_any_elements_are_read_of_any_parts(cuts: tuple[int, ...]) -> None:
    values = torch.arange(1.0, 10.0)
    saved = saved_of(values, cuts)
    stepped = torch.where(torch.arange(9) < (cuts or (9,))[0], 0, -values)
    assert saved.numel("w") == 9
    for start, stop in product(range(10), repeat=2):
        if start <= stop:
            assert saved.read("w", MASTER, start, stop - start).equal(values[start:stop])
            assert saved.read("w", "exp_avg", start, stop - start).equal(stepped[start:stop])


def test_a_checkpoint_without_the_states_of_a_rank_is_refused(tmp_path: Path) -> None:
    damaged = {"flag": "--ckpt.path", "value": tmp_path}
    with refused(ErrorCode.DAMAGED_CHECKPOINT, **damaged, told="*_model_states.pt"):
        Checkpoint(tmp_path).states(["w"])
    shapes = [{"w": torch.Size([4])}]
    common = {"param_shapes": shapes, "module": {}, "dp_world_size": 3}
    torch.save(common, tmp_path / "mp_rank_00_model_states.pt")
    for rank in (0, 2):
        torch.save({}, tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, **damaged, told=("3 ranks", "states of 2.")):
        Checkpoint(tmp_path).states(["w"])


def average(values: torch.Tensor, rank: int, mesh: Mesh) -> MovingAverage:
    return MovingAverage([("w", nn.Parameter(values))], beta=0.5, mesh=ProcessMesh.of(mesh, rank))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 2), (8, 3), (3, 8)])
def test_a_moving_average_of_other_ranks(tmp_path: Path, before: int, after: int, tensor: int) -> None:
    """`tensor` ranks have one part each of a parameter, with values of its own."""
    values = torch.arange(1.0, 8.0)
    saving, loading = Mesh(data=before, tensor=tensor), Mesh(data=after, tensor=tensor)
    for rank in range(saving.size):
        average(values * (1 + rank % tensor), rank, saving).save(CheckpointWriter(tmp_path))
    averages = [average(torch.zeros(7), rank, loading) for rank in range(loading.size)]
    for one in averages:
        one.load(tmp_path)
    for i in range(tensor):
        assert torch.cat([one.parts["w"] for one in averages[i::tensor]]).equal(values * (1 + i))


def test_a_checkpoint_of_another_model_is_refused() -> None:
    check_same_model(unknown=[], missing=[])
    with refused(ErrorCode.OTHER_RUN, told="has no a."):
        check_same_model(unknown={"c"}, missing={"b", "a"})
    with refused(ErrorCode.OTHER_RUN, told="has no c."):
        check_same_model(unknown={"c", "d"}, missing=[])


def test_a_universal_checkpoint_has_a_folder_for_each_parameter(tmp_path: Path) -> None:
    """DeepSpeed's converter stores some vectors alone and some in a dictionary, and the number of steps with
    each parameter or, at stage 3, with the optimizer."""
    torch.save({"param_shapes": [{"a": 0, "b": 0}], "module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    for name, step in (("a", 3), ("b", None)):
        folder = tmp_path / "zero" / name
        folder.mkdir(parents=True)
        values = torch.arange(6.0).view(2, 3) + (name == "b")
        torch.save(values, folder / "fp32.pt")
        torch.save({"param": -values}, folder / "exp_avg.pt")
        if step:
            torch.save(torch.tensor(step), folder / "step.pt")
    common = {"overflow": False, "optimizer_state_dict": {"state": {0: {"step": 7}}}}
    torch.save(common, tmp_path / "zero" / "optimizer_state.pt")
    checkpoint = Checkpoint(tmp_path)
    saved = checkpoint.states(["a", "b"])
    assert saved.read("a", MASTER, 1, 4).tolist() == [1, 2, 3, 4]
    assert saved.read("b", "exp_avg", 4, 2).tolist() == [-5, -6]
    assert (saved.scalars, saved.loss_scale) == ({"a": {"step": 3}, "b": {"step": 7}}, {"overflow": False})
    with refused(ErrorCode.OTHER_RUN):
        checkpoint.states(["a", "c"])


def optimizer_of(kind: type, **attributes: Any) -> Any:
    """Returns an optimizer of DeepSpeed with these attributes alone."""
    optimizer = object.__new__(kind)
    optimizer.__dict__.update(attributes)
    return optimizer


def test_groups_of_parameters_without_shards() -> None:
    """In half precision the optimizer updates copies of the parameters."""
    params = [nn.Parameter(torch.full((n,), float(n))) for n in (1, 2, 3)]
    masters = [p.detach().clone() for p in params]
    names = dict(zip(params, "abc", strict=True))
    half = optimizer_of(
        FP16_UnfusedOptimizer,
        fp16_groups=[params[:1], params[1:]],
        fp32_groups=[masters[:1], masters[1:]],
        optimizer=SimpleNamespace(state={masters[1]: {"exp_avg": -masters[1], "step": torch.tensor(4)}}),
    )
    plain = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    for optimizer, stepped_on in ((half, masters), (plain, params)):
        engine = SimpleNamespace(optimizer=optimizer, param_names=names)
        groups = list(_list_groups(engine))
        assert [(g.names, g.pieces) for g in groups] == [
            ([name], [Piece(name, 0, size, 0)]) for name, size in (("a", 1), ("b", 2), ("c", 3))
        ]
        assert all(group.master is one for group, one in zip(groups, stepped_on, strict=True))
    found = {
        name: tensor.tolist()
        for name, tensor in stepped_tensors(SimpleNamespace(optimizer=half, param_names=names))
    }
    assert found == {"a (fp32)": [1], "b (exp_avg)": [-2, -2], "b (fp32)": [2, 2], "c (fp32)": [3, 3, 3]}


def test_groups_of_parameters_that_all_ranks_share(threads: Callable) -> None:
    """At stage 3 each of two ranks has the half of every parameter, padded to the size of the first half."""

    def of_rank() -> tuple:
        params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
        for param, numel in zip(params, (4, 5, 1), strict=True):
            param.ds_numel, param.partition_numel = numel, lambda numel=numel: -(-numel // 2)
        optimizer = optimizer_of(
            DeepSpeedZeroOptimizer_Stage3,
            fp16_groups=[params[:2], params[2:]],
            fp32_partitioned_groups_flat=[torch.zeros(5), torch.zeros(1)],
            dp_process_group=dist.group.WORLD,
        )
        engine = SimpleNamespace(optimizer=optimizer, param_names=dict(zip(params, "abc", strict=True)))
        return dist.get_rank(), names_in_order(engine), [group.pieces for group in _list_groups(engine)]

    expected = {
        0: [[Piece("a", 0, 2, 0), Piece("b", 0, 3, 2)], [Piece("c", 0, 1, 0)]],
        1: [[Piece("a", 2, 2, 0), Piece("b", 3, 2, 2)], [Piece("c", 1, 0, 0)]],
    }
    for rank, names, pieces in threads(2, of_rank):
        assert names == ["a", "b", "c"] and pieces == expected[rank]


def test_the_loss_scale_of_stage_0_goes_on() -> None:
    param, scale = nn.Parameter(torch.zeros(2)), {"cur_scale": 8.0, "cur_iter": 5, "last_overflow_iter": 3}
    master = param.detach().clone()
    optimizer = optimizer_of(
        FP16_UnfusedOptimizer,
        fp16_groups=[[param]],
        fp32_groups=[[master]],
        optimizer=torch.optim.AdamW([master]),
        loss_scale_config=SimpleNamespace(cur_scale=64.0, cur_iter=0, last_overflow_iter=-1, scale_window=9),
    )
    whole = {"fp32_groups": [[torch.ones(2)]], "optimizer_state_dict": {"state": {}}, **scale}
    saved = _states_of_stage_0(["w"], {"optimizer": whole, "module": {"w": torch.ones(2)}})
    engine = SimpleNamespace(optimizer=optimizer, param_names={param: "w"})
    with torch.no_grad():
        _load_optimizer(optimizer, list(_list_groups(engine)), saved, with_states=True)
    assert vars(optimizer.loss_scale_config) == {**scale, "scale_window": 9}
    assert master.tolist() == param.tolist() == [1, 1]
