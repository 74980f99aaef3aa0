"""The state that a DeepSpeed engine offloads between optimizer steps, and gets back to the last bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from openrlhf.backends.deepspeed import optimizer_state
from openrlhf.backends.deepspeed.optimizer_state import GRADIENTS, OptimizerState


class Engine:
    """An engine with two groups, of which the first has made a step. `calls`: those that move gradients and
    clear references."""

    def __init__(self, stage: int) -> None:
        self.calls: list[Any] = []
        self.masters = [torch.arange(6.0).view(2, 3), torch.arange(4.0)]
        self.state = {"exp_avg": -torch.arange(6.0), "step": torch.tensor(3.0), "name": "w"}
        self.optimizer: Any = SimpleNamespace()
        if stage == 3:
            self.optimizer = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
        masters = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        note = lambda name: lambda: self.calls.append(name)
        self.optimizer.__dict__.update(
            {
                masters: self.masters,
                "optimizer": SimpleNamespace(state={self.masters[0]: self.state}),
                "_clear_muon_allgather_buffers": note("clear buffers"),
                "_muon_pending_momentum": {0: "of a step"},
                "_clear_hp_buffer_references": note("unlink"),
                "_link_all_hp_params": note("link"),
                "_hp_optimizer_states_linked": True,
            }
        )

    def offload_states(self, include: Any) -> None:
        self.calls.append(("offload", include))

    def reload_states(self) -> None:
        self.calls.append("reload")

    def tensors(self) -> list[torch.Tensor]:
        return [*self.masters, self.state["exp_avg"], self.state["step"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_offloaded_comes_back(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE", 4)  # elements: two pieces of six
    engine = Engine(stage)
    state = OptimizerState(engine, on_host=False)
    for value in (1.0, 2.0):  # the second time in the same host memory
        engine.calls.clear()
        for tensor in engine.tensors():
            tensor.add_(value)
        expected = [tensor.clone() for tensor in engine.tensors()]
        state.reload()  # nothing is offloaded
        state.offload()
        state.offload()
        assert state.is_offloaded and [tensor.numel() for tensor in engine.tensors()] == [0] * 4
        state.reload()
        state.reload()
        assert not state.is_offloaded
        for tensor, before in zip(engine.tensors(), expected, strict=True):
            assert tensor.equal(before)
        gradients = [("offload", GRADIENTS), "reload"] if stage == 3 else ["unlink", "link"]
        assert engine.calls == ["clear buffers", *gradients]
    zero = engine.optimizer
    assert zero._muon_pending_momentum == ({0: "of a step"} if stage == 3 else {})
    assert zero._hp_optimizer_states_linked == (stage == 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_that_is_always_on_the_host_stays_there(stage: int) -> None:
    engine = Engine(stage)
    state = OptimizerState(engine, on_host=True)
    state.offload()
    assert [tensor.numel() for tensor in engine.tensors()] == [6, 4, 6, 1]
    state.reload()
    assert engine.calls == ["clear buffers", *([("offload", GRADIENTS), "reload"] if stage == 3 else [])]
