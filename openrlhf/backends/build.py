"""Builds a model's engine for `--train.backend`, and imports only that backend's library."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from openrlhf.backends.model_rank import FrozenRank, TrainedRank
from openrlhf.config.choices import BackendName
from openrlhf.models.backbone import RowModel

ENGINES: dict[str, tuple[str, str, str]] = {
    "deepspeed": ("openrlhf.backends.deepspeed.engine", "DeepSpeedEngine", "DeepSpeedFrozen"),
    "torch": ("openrlhf.backends.torch.engine", "TorchEngine", "TorchFrozen"),
}
"""Maps a backend to its module, the class of a model in training and the class of a frozen model."""


def build_engine(build_model: Callable[[], RowModel], *, backend: BackendName, **options: Any) -> TrainedRank:
    """Builds one rank of a model in training. `options`: those of `TrainedRank`."""
    return _find_class(backend, 1)(build_model, **options)


def build_frozen(build_model: Callable[[], RowModel], *, backend: BackendName, **options: Any) -> FrozenRank:
    """Builds one rank of a model that is not trained. `options`: those of `FrozenRank`."""
    return _find_class(backend, 2)(build_model, **options)


def _find_class(backend: BackendName, place: int) -> Any:
    return getattr(import_module(ENGINES[backend][0]), ENGINES[backend][place])
