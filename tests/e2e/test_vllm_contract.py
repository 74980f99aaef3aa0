"""vLLM's engine satisfies the contract of engines."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_contract import options_of

from openrlhf.backends.rollout import engine_class
from openrlhf.tasks.tiny_model import tiny_chat_model


@pytest.mark.usefixtures("cpu_engines")
def test_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_worker: Callable[..., list]) -> None:
    model = tiny_chat_model(tmp_path / "model")
    options = options_of("vllm", model)
    for name, value in engine_class(options).environment(options).items():
        monkeypatch.setenv(name, value)
    (checked,) = run_worker("engine_contract_of_vllm", 1, model=str(model))
    assert len(checked) == 11
