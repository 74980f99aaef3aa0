"""Weight syncs to an engine in pipeline stages: every stage receives all weights, and keeps its own."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer

from openrlhf.backends.vllm.weight_receiver import CheckedLoading
from openrlhf.backends.weight_sync.checksum import Checksum


class Stage(nn.Module):
    """One of two stages: a layer of its own, and vLLM's stand-ins for the layers of others."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) if i == own else PPMissingLayer() for i in range(2)])
        self.lm_head = nn.Linear(2, 4, bias=False) if own == 1 else PPMissingLayer()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


class Idle(WeightTransferEngine):
    """vLLM's part of a transfer, which does nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


class Transfer(CheckedLoading, Idle):
    pass


class Counted(CheckedLoading, Idle):
    """Counts vLLM's reloads of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reloads: list[str] = []


@pytest.mark.parametrize("at_a_time", [1, 6])
def test_weights_that_come_in_several_parts_are_one_reload(monkeypatch, at_a_time):
    """A second begin would drop the parts before it, and without an end layers keep processed weights."""
    monkeypatch.setattr(Idle, "start_weight_update", lambda transfer: transfer.reloads.append("begin"))
    monkeypatch.setattr(Idle, "finish_weight_update", lambda transfer: transfer.reloads.append("end"))
    transfer = Counted(stage := Stage(0))
    sent = [(name, torch.zeros_like(p)) for name, p in stage.named_parameters()]
    adapter = ("base_model.model.q_proj.lora_A.weight", torch.zeros(1))
    for parts in ([sent[:at_a_time], sent[at_a_time:], [adapter]], [[adapter]]):
        transfer.start_weight_update()
        for part in parts:
            transfer.model.load_weights(part)
        transfer.finish_weight_update()
    assert transfer.reloads == ["begin", "end"]  # an adapter alone replaces no weights


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("at_a_time", [1, 2, 5])
def test_a_stage_sums_up_what_it_was_sent_and_keeps_its_own(own: int, at_a_time: int) -> None:
    torch.manual_seed(own)
    shapes = {
        f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in [("weight", (2, 2)), ("bias", 2)]
    }
    sent = {name: torch.randn(shape) for name, shape in (shapes | {"lm_head.weight": (4, 2)}).items()}
    expected = Checksum()
    for name, tensor in sent.items():
        expected.add(name, tensor)

    transfer = Transfer(Stage(own))
    transfer.start_weight_update()
    pairs = list(sent.items())
    for start in range(0, len(pairs), at_a_time):
        transfer.model.load_weights(pairs[start : start + at_a_time])
    transfer.finish_weight_update()
    assert transfer.checksum.value == expected.value
    held = dict(transfer.model.named_parameters())
    of_stage = (f"layers.{own}.", "lm_head") if own == 1 else f"layers.{own}."
    assert held.keys() == {name for name in sent if name.startswith(of_stage)}
    assert all(torch.equal(held[name], sent[name]) for name in held)
