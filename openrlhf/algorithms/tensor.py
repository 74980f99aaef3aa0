"""The type `Tensor` for annotations in modules that `--help` imports: they must not import torch, which takes
seconds."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

__all__ = ["Tensor"]
