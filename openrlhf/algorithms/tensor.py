"""The type `Tensor` for annotations of modules that the command line reads without importing torch, which
takes seconds."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

__all__ = ["Tensor"]
