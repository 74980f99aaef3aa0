"""Builds a model's engine for `--train.backend`, and imports only that backend's library."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from openrlhf.backends.base import FrozenModel, TrainEngine
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.config.choices import BackendName
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.models.backbone import RowModel

ENGINES: dict[str, tuple[str, str, str]] = {
    "deepspeed": ("openrlhf.backends.deepspeed.engine", "DeepSpeedEngine", "DeepSpeedFrozen"),
    "torch": ("openrlhf.backends.torch.engine", "TorchEngine", "TorchFrozen"),
}
"""Maps a backend to its module, the class of a model in training and the class of a frozen model."""


def build_engine(
    build_model: Callable[[], RowModel],
    *,
    backend: BackendName,
    optim: OptimConfig,
    ds: DeepSpeedConfig,
    total_steps: int,
    mesh: ProcessMesh,
    gradient_checkpointing: bool = False,
    reentrant: bool = False,
    dropout: bool = False,
    ema_beta: float | None = None,
    skip_nonfinite: bool = False,
    learns: bool = True,
) -> TrainEngine:
    """Builds one rank of a model in training. Call `init_distributed` first.

    `build_model`: builds the module. The engine calls it after setting up sharding, so that ranks need not
    load the whole model. `total_steps`: optimizer steps of the whole run, for the learning rate schedule.
    `dropout`: train with the dropout of the model's configuration; without it a training pass computes the
    same as `forward` and `evaluate`, except for the dropout of adapters. `ema_beta`: decay of a moving
    average of the trained weights, None for no average; `export` writes the average and checkpoints keep it,
    nothing else uses it. `skip_nonfinite`: go on after a step whose loss or gradient is not finite. `learns`:
    False builds no optimizer states and loads the weights of checkpoints alone, for a model whose weights are
    only read.
    """
    return _find_class(backend, 1)(
        build_model,
        optim=optim,
        ds=ds,
        total_steps=total_steps,
        gradient_checkpointing=gradient_checkpointing,
        reentrant=reentrant,
        dropout=dropout,
        ema_beta=ema_beta,
        skip_nonfinite=skip_nonfinite,
        learns=learns,
        mesh=mesh,
    )


def build_frozen(
    build_model: Callable[[], RowModel],
    *,
    backend: BackendName,
    ds: DeepSpeedConfig,
    offload: bool,
    mesh: ProcessMesh,
) -> FrozenModel:
    """Builds one rank of a model that is not trained. `offload`: keep its weights in CPU memory."""
    return _find_class(backend, 2)(build_model, ds=ds, offload=offload, mesh=mesh)


def _find_class(backend: BackendName, place: int) -> Any:
    return getattr(import_module(ENGINES[backend][0]), ENGINES[backend][place])
