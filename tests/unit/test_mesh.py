"""Ranks in a mesh: their samples, and sums that count each sample once."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from records import batch_of, trajectory
from refusals import refused
from torch import Tensor, nn

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.deepspeed.model_parallel import ModelParallelUnit
from openrlhf.backends.deepspeed.optimizer_state import OptimizerState
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.data.batches import MiniBatches
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh
from openrlhf.rows import ExperienceRow, LossNorm, PackedRow, Sample

LENGTHS = (5, 9, 3, 7, 4, 8, 2)
SIZES = st.integers(1, 4)
TWO_BY_TWO = [{"tensor": 2}, {"sequence": 2}]


def test_ranks_are_counted_along_tensor_then_sequence_then_data() -> None:
    mesh = Mesh(data=2, sequence=3, tensor=2)
    assert [tuple(mesh.coordinates(rank)) for rank in range(12)] == list(
        product(range(2), range(3), range(2))
    )
    assert list(mesh.leaders) == [0, 6] and mesh.size == 12 and mesh.shape == (2, 3, 2)


@given(num_ranks=st.integers(1, 64), sequence=SIZES, tensor=SIZES)
def test_a_mesh_leaves_fewer_ranks_over_than_one_more_copy_needs(num_ranks, sequence, tensor):
    mesh = Mesh.within(num_ranks, sequence=sequence, tensor=tensor)
    assert mesh.data == 1 or mesh.size <= num_ranks
    assert mesh.size + mesh.replica > num_ranks


class Dataset(list):
    lengths = LENGTHS


def samples() -> Dataset:
    random = torch.Generator().manual_seed(0)
    return Dataset(
        Sample(token_ids=torch.randint(0, 10, (n,), generator=random), action_mask=torch.arange(n) >= 1)
        for n in LENGTHS
    )


def mean_of_squares(model: nn.Linear, row: PackedRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss whose gradient differs between rows."""
    actions = row.token_ids[row.action_mask].double()
    loss = (model(actions[:, None]) ** 2).sum() / norm.num_tokens
    return loss, {"loss": loss, "sequences": torch.tensor(row.num_sequences).double() / norm.num_sequences}


def train_step(**sizes: int) -> tuple[list[list[int]], Tensor, dict[str, float]]:
    """Returns (this rank's rows, the gradient as DeepSpeed averages it over all ranks, metrics) of one
    step."""
    mesh = ProcessMesh.joined(**sizes)
    mini_batches = MiniBatches(
        samples(),
        PackedRow.of,
        batch_size=len(LENGTHS),
        micro_batch_size=2,
        data_rank=mesh.data_rank,
        data_size=mesh.data,
        seed=0,
    )
    model = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine.mesh, engine.device, engine.average = mesh, torch.device("cpu"), None
    engine.plain_training, engine.clips_itself, engine.scales_loss = True, False, False
    engine.engine = Replica(model)
    engine.optimizer_state = OptimizerState(engine.engine, on_host=True)
    ((rows, items),) = zip(mini_batches.epoch(0), mini_batches.items(0), strict=True)
    metrics = engine.train_step(rows, mean_of_squares)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradient)
    return items, gradient / dist.get_world_size(), metrics


class Replica:
    """Replica with the part of DeepSpeed that `train_step` uses. Calling it calls the model."""

    global_steps = 1

    def __init__(self, model: nn.Module) -> None:
        self.model, self.boundaries = model, list[bool]()
        self.module = SimpleNamespace(model=model, train=model.train, eval=model.eval, modules=model.modules)

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self.boundaries.append(is_last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Checks that the last pass alone was announced as the one after which gradients are reduced."""
        assert self.boundaries == [False] * (len(self.boundaries) - 1) + [True]

    def was_step_applied(self) -> bool:
        return True

    def get_lr(self) -> list[float]:
        return [0.0]

    def get_global_grad_norm(self) -> float:
        return 0.0


@pytest.mark.parametrize("sizes", [{}, *TWO_BY_TWO, {"sequence": 2, "tensor": 2}])
def test_each_sample_counts_once_however_many_ranks_share_it(threads: Callable, sizes: dict) -> None:
    ((_, expected, expected_metrics),) = threads(1, train_step)
    assert expected_metrics["num_tokens"] == sum(n - 1 for n in LENGTHS)
    assert expected_metrics["sequences"] == pytest.approx(1)
    for _, gradient, metrics in threads(4, lambda: train_step(**sizes)):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
        assert metrics == pytest.approx(expected_metrics, rel=1e-12)


@pytest.mark.parametrize("sizes", [{}, *TWO_BY_TWO])
def test_the_tokens_of_a_prompt_are_counted_over_all_rows_and_ranks(threads: Callable, sizes: dict) -> None:
    """Each group of ranks has two rows. Prompt 0 has an action in every row, prompt 2 three actions in the
    second rows alone, and prompt 1 has no action in this optimizer step."""

    def totals() -> tuple[int, list[int]]:
        rank = DeepSpeedEngine.__new__(DeepSpeedEngine)
        rank.mesh, rank.device = ProcessMesh.joined(**sizes), torch.device("cpu")
        samples = [trajectory(token_ids=range(1 + n), action_mask=[False] + [True] * n) for n in (1, 4)]
        prompts = [np.array(x, np.int32) for x in ([0], [0, 2, 2, 2])]
        rows = [
            ExperienceRow.of(batch_of([sample], advantages=1.0, returns=1.0, prompts=column))
            for sample, column in zip(samples, prompts, strict=True)
        ]
        _, norm = rank._agree(rows)
        assert norm.prompt_tokens is not None
        return rank.mesh.data, norm.prompt_tokens.tolist()

    for data, found in threads(4, totals):
        assert found == [2 * data, 0, 3 * data]


@pytest.mark.parametrize("sizes", TWO_BY_TWO)
def test_ranks_that_share_samples_get_the_same_rows(threads: Callable, sizes: dict) -> None:
    rows = [items for items, _, _ in threads(4, lambda: train_step(**sizes))]
    assert rows[0] == rows[1] and rows[2] == rows[3]
    assert sorted(i for items in (rows[0], rows[2]) for row in items for i in row) == list(range(7))


def test_one_rank_exports(threads: Callable) -> None:
    found = threads(4, lambda: ProcessMesh.joined(tensor=2))
    assert [mesh.data_rank for mesh in found] == [0, 0, 1, 1]
    assert [mesh.is_first for mesh in found] == [True, False, False, False]


def test_ranks_with_the_same_part_of_matrices_reduce_together(threads: Callable) -> None:
    """Ranks with the same part of the matrices reduce gradients together, whether or not they have the same
    samples."""

    def groups() -> tuple:
        mesh = ProcessMesh.joined(sequence=2, tensor=2)
        unit = ModelParallelUnit(mesh)
        assert unit.get_data_parallel_world_size() == 4 and unit.get_model_parallel_world_size() == 2
        own, same = unit.get_data_parallel_group(), unit.get_model_parallel_group()
        assert own is not None and same is not None
        assert (own.rank(), same.rank()) == (unit.get_data_parallel_rank(), unit.get_model_parallel_rank())
        return dist.get_process_group_ranks(own), dist.get_process_group_ranks(same)

    found = threads(8, groups)
    assert found == [
        ([rank % 2 + 2 * i for i in range(4)], [rank - rank % 2, rank - rank % 2 + 1]) for rank in range(8)
    ]


def test_ranks_that_make_no_whole_mesh_are_refused(threads: Callable) -> None:
    def join() -> str:
        with refused(ErrorCode.RESOURCES) as refusal:
            ProcessMesh.joined(tensor=2)
        return refusal.value.text

    for text in threads(3, join):
        assert "3 ranks" in text and "multiple of 2 ranks" in text
