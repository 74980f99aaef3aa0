"""The average of weights equals numbers worked by hand. Sharded weights are in tests/e2e."""

from pathlib import Path

import pytest
import torch
from refusals import refused
from torch import Tensor, nn

from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.errors import ErrorCode


def averaged(*weights: Tensor, beta: float, num_parts: int = 1) -> tuple[MovingAverage, list[nn.Parameter]]:
    parameters = [nn.Parameter(w) for w in weights]
    named = [(f"w{i}", param) for i, param in enumerate(parameters)]
    return MovingAverage(named, beta=beta, mesh=ProcessMesh(data=num_parts)), parameters


def step(average: MovingAverage, param: nn.Parameter, value: list[float]) -> list[float]:
    param.data.copy_(torch.tensor(value))
    average.update()
    return dict(average.in_full())["w0"].tolist()


def test_each_step_moves_the_average_by_its_share() -> None:
    """By hand: 0.75 * (4, 8) + 0.25 * (8, 0) = (5, 6), then 0.75 * (5, 6) + 0.25 * (1, 2) = (4, 5)."""
    average, (param,) = averaged(torch.tensor([4.0, 8.0]), beta=0.75)
    assert dict(average.in_full())["w0"].tolist() == [4, 8]
    assert step(average, param, [8, 0]) == [5, 6]
    assert step(average, param, [1, 2]) == [4, 5]
    assert param.tolist() == [1, 2]


def test_weights_that_stay_are_their_own_average() -> None:
    average, (param,) = averaged(torch.randn(1000), beta=0.992)
    for _ in range(20):
        average.update()
    assert torch.equal(dict(average.in_full())["w0"], param)


def test_the_average_of_bfloat16_weights_keeps_what_bfloat16_cannot() -> None:
    """100 steps of 1e-5 each are lost in bfloat16, whose numbers after 1 are 2 ** -7 apart."""
    average, (param,) = averaged(torch.ones(3, dtype=torch.bfloat16), beta=1 - 1e-5)
    param.data.fill_(2)
    for _ in range(100):
        average.update()
    torch.testing.assert_close(average.parts["w0"], torch.full((3,), 1.001), atol=1e-5, rtol=0)
    assert dict(average.in_full())["w0"].dtype == torch.bfloat16


def test_frozen_weights_have_no_average() -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    named = [("frozen", frozen), ("trained", nn.Parameter(torch.zeros(2)))]
    assert MovingAverage(named, beta=0.9, mesh=ProcessMesh()).parts.keys() == {"trained"}


@pytest.mark.parametrize("dimension", ["data", "sequence"])
def test_each_rank_averages_a_part_of_every_weight(dimension: str) -> None:
    """Ranks have three and two of five elements, all and none of one; as ZeRO shards them, over all ranks."""
    named = [("w", nn.Parameter(torch.zeros(5))), ("b", nn.Parameter(torch.zeros(1)))]
    meshes = [ProcessMesh(**{dimension: 2}, rank=rank) for rank in range(2)]
    ranks = [MovingAverage(named, beta=0.5, mesh=mesh) for mesh in meshes]
    named[0][1].data.copy_(torch.arange(5))
    for rank in ranks:
        rank.update()
    assert [rank.parts["w"].tolist() for rank in ranks] == [[0, 0.5, 1], [1.5, 2]]
    assert [rank.parts["b"].tolist() for rank in ranks] == [[0], []]


def test_a_saved_average_goes_on_as_it_was(tmp_path: Path) -> None:
    average, (param,) = averaged(torch.randn(7), beta=0.9)
    param.data.normal_()
    average.update()
    average.save(CheckpointWriter(tmp_path))
    resumed, (same,) = averaged(torch.zeros(7), beta=0.9)
    resumed.load(tmp_path)
    for each in (param, same):
        each.data.copy_(torch.arange(7))
    average.update()
    resumed.update()
    assert torch.equal(resumed.parts["w0"], average.parts["w0"])


def test_a_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    with refused(ErrorCode.OTHER_RUN, flag="--train.enable_ema"):
        averaged(torch.zeros(7), beta=0.9)[0].load(tmp_path)
