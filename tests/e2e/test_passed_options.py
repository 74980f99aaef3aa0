"""Options that are passed through to DeepSpeed are those of its engine."""

from collections.abc import Callable
from pathlib import Path

from openrlhf.tasks.tiny_model import tiny_chat_model


def test_deepspeed_has_the_options(tmp_path: Path, run_worker: Callable[..., list]) -> None:
    config = {"wall_clock_breakdown": True, "zero_optimization": {"sub_group_size": 1234}}
    (found,) = run_worker("passed_options", 1, model=str(tiny_chat_model(tmp_path / "model")), config=config)
    assert found == {"sub_group_size": 1234, "clock": True}
