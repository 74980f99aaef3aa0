"""Engines are built with all of their options."""

from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.backends import build
from openrlhf.backends.build import ENGINES, build_engine, build_frozen


@pytest.mark.parametrize("backend", ENGINES)
def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    made: list[tuple] = []
    module, trained, frozen = ENGINES[backend]
    keeping = lambda name: lambda *args, **options: made.append((name, args, options))
    known = {module: SimpleNamespace(**{name: keeping(name) for name in (trained, frozen)})}
    monkeypatch.setattr(build, "import_module", known.__getitem__)
    common: dict[str, Any] = {"ds": "ds", "mesh": "mesh"}
    model: Any = object()
    more: dict[str, Any] = {"optim": "optim", "total_steps": 7, "gradient_checkpointing": True}
    more |= {"reentrant": True, "dropout": True, "ema_beta": 0.9, "skip_nonfinite": True, "learns": False}
    build_engine(model, backend=backend, **common, **more)
    build_frozen(model, backend=backend, **common, offload=True)
    assert made == [(trained, (model,), common | more), (frozen, (model,), common | {"offload": True})]
