"""Checkpoints of the DeepSpeed engine, without DeepSpeed."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.deepspeed.optimizer_state import OptimizerState
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.errors import ErrorCode


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the process group by one of a single rank."""
    for name, answer in {"barrier": None, "get_rank": 0, "get_world_size": 1}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda answer=answer: answer)
    gather = lambda found, own: found.__setitem__(0, own)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)


def engine_without_deepspeed() -> Any:
    """Returns a DeepSpeedEngine around an engine that keeps what it saves."""
    engine, kept = DeepSpeedEngine.__new__(DeepSpeedEngine), {}

    def save(folder: str, **options) -> None:
        kept.update(options["client_state"])

    engine.engine = SimpleNamespace(
        save_checkpoint=save,
        kept=kept,
        checkpoint_mp_rank=0,
        optimizer=SimpleNamespace(param_groups=[]),
        param_names={},
        lr_scheduler=LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), lambda step: 1.0),
    )
    engine.learns = True
    engine.average, engine.stage, engine.mesh, engine.files = None, 0, ProcessMesh(), SimpleNamespace()
    engine.optimizer_state = OptimizerState(engine.engine, on_host=True)
    engine.check_finite = lambda: None  # there are no weights
    return engine


def test_the_moving_average_is_in_the_checkpoint(tmp_path, monkeypatch):
    alone(monkeypatch)
    calls: list[str] = []
    engine = engine_without_deepspeed()
    monkeypatch.setattr(
        "openrlhf.backends.deepspeed.engine.load_states", lambda engine, checkpoint, of_optimizer: engine.kept
    )
    engine.average = SimpleNamespace(
        save=lambda writer: calls.append(f"save {writer.folder}"),
        load=lambda folder: calls.append(f"load {folder}"),
    )
    folder = tmp_path / "global_step1"
    engine.save_checkpoint(str(tmp_path), folder.name, {"step": 1})
    assert engine.load_checkpoint(str(tmp_path), folder.name) == {"step": 1}
    assert calls == [f"save {folder}", f"load {folder}"]


def test_a_checkpoint_has_no_files_of_an_earlier_attempt(tmp_path, monkeypatch):
    """The earlier attempt had more ranks, or another ZeRO stage."""
    alone(monkeypatch)
    stale = tmp_path / "one" / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    stale.parent.mkdir()
    stale.touch()
    engine_without_deepspeed().save_checkpoint(str(tmp_path), "one", {})
    assert sorted(path.name for path in stale.parent.iterdir()) == ["manifest.json", "random_state_0.pt"]


def test_a_checkpoint_that_is_not_found_is_an_error_and_no_empty_state(tmp_path):
    (tmp_path / "global_step1").mkdir()
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value=tmp_path / "global_step1"):
        engine_without_deepspeed().load_checkpoint(str(tmp_path), "global_step1")


@pytest.mark.parametrize(
    ("metrics", "updates"), [({"grad_norm": 2.0}, 1), ({"grad_norm": math.inf}, 0), ({"skipped": 1.0}, 0)]
)
def test_a_step_that_changes_no_weights_does_not_move_the_average(monkeypatch, metrics, updates) -> None:
    """The second is one that the loss scaler of fp16 skips."""
    engine, calls = engine_without_deepspeed(), []
    monkeypatch.setattr(TrainedRank, "optim_step", lambda *_: metrics)
    engine.average = SimpleNamespace(update=lambda: calls.append(None))
    assert engine.optim_step() == metrics
    assert len(calls) == updates
