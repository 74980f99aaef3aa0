"""Checks that the tensors of all ranks are finite: neither NaN nor infinite."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from openrlhf.errors import ErrorCode, RunError


class NotFiniteError(RunError, FloatingPointError):
    """Raised when a weight, an optimizer state, a metric or the gradient norm is NaN or infinite."""


def check_finite(named: Iterable[tuple[str, Tensor]], step: int, device: torch.device) -> None:
    """Raises NotFiniteError on all ranks if a tensor of any rank has a value that is not finite. Collective.
    Single tensors are examined only if the norm of all tensors is not finite. `step`: optimizer steps
    done."""
    held = [(name, t.detach()) for name, t in named if t.is_floating_point() and t.numel()]
    norm = get_total_norm([t for _, t in held])
    is_suspect = (~norm.isfinite()).to(device, torch.int32)
    dist.all_reduce(is_suspect, dist.ReduceOp.MAX)
    if not is_suspect.item():
        return
    found: list[str | None] = [None] * dist.get_world_size()
    # the norm of finite values may be infinite in half precision
    dist.all_gather_object(found, next((name for name, t in held if not t.isfinite().all()), None))
    if (rank := next((rank for rank, name in enumerate(found) if name), None)) is not None:
        text = (
            f"after optimizer step {step}, {found[rank]} is not finite on rank {rank}. The model is neither "
            "saved nor sent to engines.\nResume from the last checkpoint, with a lower learning rate."
        )
        raise NotFiniteError(ErrorCode.NOT_FINITE, text)
