"""Shards of saved ranks are assembled to the shards of other ranks."""

from itertools import product
from pathlib import Path

import pytest
import torch
from refusals import refused
from torch import nn

from openrlhf.backends.checkpoint_writer import CheckpointWriter
from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.deepspeed.resharding import MASTER, Checkpoint, SavedStates, check_same_model, slice_of
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh

SIZES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("numel", [1, 2, 7, 8, 40])
def test_slices_are_equal_parts_of_the_whole(numel: int) -> None:
    for size in SIZES:
        parts = [slice_of(numel, rank, size) for rank in range(size)]
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
    with refused(ErrorCode.DAMAGED_CHECKPOINT, **damaged) as refusal:
        Checkpoint(tmp_path).states(["w"])
    assert "*_model_states.pt" in refusal.value.text
    shapes = [{"w": torch.Size([4])}]
    common = {"param_shapes": shapes, "module": {}, "dp_world_size": 3}
    torch.save(common, tmp_path / "mp_rank_00_model_states.pt")
    for rank in (0, 2):
        torch.save({}, tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, **damaged) as refusal:
        Checkpoint(tmp_path).states(["w"])
    assert "3 ranks" in refusal.value.text and "states of 2." in refusal.value.text


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
    with refused(ErrorCode.OTHER_RUN) as refusal:
        check_same_model(unknown={"c"}, missing={"b", "a"})
    assert "has no a." in refusal.value.text
    with refused(ErrorCode.OTHER_RUN) as refusal:
        check_same_model(unknown={"c", "d"}, missing=[])
    assert "has no c." in refusal.value.text
