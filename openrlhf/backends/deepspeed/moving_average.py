"""An exponential moving average of a model's weights over the optimizer steps of a run.

The average often performs better than the last weights, because it averages out the noise of single steps
(https://arxiv.org/abs/1803.05407, https://arxiv.org/abs/1909.13719).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from openrlhf.backends.distributed import ProcessMesh, current_device
from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.checkpoint.zero import find_slice
from openrlhf.device import DEVICE_TYPE
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.tensor_parallel import put_together


class MovingAverage:
    """One rank's part of the average: p_mean <- beta * p_mean + (1 - beta) * p for each trained parameter p.

    The average is float32 in CPU memory, whatever the dtype and device of the weights. Each rank averages a
    part of every parameter (at ZeRO stage 3 its own shard), so an update needs no communication.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, beta: float, mesh: ProcessMesh
    ) -> None:
        """Starts the average at the current weights."""
        self.beta, self.mesh = beta, mesh
        self.parameters = {name: param for name, param in parameters if param.requires_grad}
        on_gpu = DEVICE_TYPE == "cuda"
        parts = {name: self._own_part(param) for name, param in self.parameters.items()}
        self._copies = {
            name: torch.empty_like(part, device="cpu", pin_memory=on_gpu) for name, part in parts.items()
        }
        self.parts = {name: copy.to(torch.float32, copy=True) for name, copy in self._copied()}

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the current weights. Call it after each optimizer step."""
        for name, copy in self._copied():
            self.parts[name].lerp_(copy.float(), 1 - self.beta)

    def in_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, average in the shape and dtype of the parameter) on rank 0, and nothing on other
        ranks. The iteration is collective."""
        for name, part in self.parts.items():
            param = self.parameters[name]
            whole = self._joined(part.to(current_device(), param.dtype), param)
            if whole is not None:
                yield name, whole

    def save(self, writer: CheckpointWriter) -> None:
        """Writes this rank's part into a checkpoint's folder."""
        file = _file(writer.folder, self.mesh.rank)
        about = {"num_parts": str(self.mesh.size)}
        writer.write(file, lambda stream: stream.write(save(self.parts, about)))

    def load(self, folder: str | Path) -> None:
        """Restores the average, to the last bit. Any number of ranks with the same tensor-parallel size may
        have saved it. Raises UsageError on every rank if the folder has no average."""
        with ExitStack() as opened, pickles.refusing(folder):
            saved = _saved_files(Path(folder))[self.mesh.rank % self.mesh.tensor :: self.mesh.tensor]
            files = [opened.enter_context(safe_open(file, "pt")) for file in saved]
            for name, own in self.parts.items():
                self._read(
                    own, [file.get_slice(name) for file in files], _shape(self.parameters[name]).numel()
                )

    def _read(self, own: Tensor, parts: Sequence[Any], numel: int) -> None:
        """Fills this rank's part `own` of a parameter with `numel` elements from the saved parts of all
        ranks."""
        mine = self._slice(numel)
        for rank, part in enumerate(parts):
            theirs = find_slice(numel, rank, len(parts))
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if start < stop:
                own[start - mine.start : stop - mine.start] = part[start - theirs.start : stop - theirs.start]

    def _copied(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, this rank's part of the current weight on the CPU), after one synchronization with
        the device."""
        for name, copy in self._copies.items():
            copy.copy_(self._own_part(self.parameters[name]), non_blocking=True)
        if DEVICE_TYPE == "cuda":
            torch.cuda.current_stream().synchronize()
        yield from self._copies.items()

    def _own_part(self, param: nn.Parameter) -> Tensor:
        """Returns this rank's part of a parameter: at ZeRO stage 3 its shard, otherwise an equal share of the
        parameter's elements, in order."""
        if hasattr(param, "ds_tensor"):
            return getattr(param, "ds_tensor").detach()  # noqa: B009  an attribute that DeepSpeed adds
        mine = self._slice(param.numel())
        return param.detach().flatten()[mine.start : mine.stop]

    def _slice(self, numel: int) -> range:
        """Returns the range of a parameter's `numel` elements that this rank averages."""
        return find_slice(numel, self.mesh.copy, self.mesh.copies)

    def _joined(self, part: Tensor, param: nn.Parameter) -> Tensor | None:
        """Gathers all parts of a parameter into one tensor on rank 0; returns None on other ranks."""
        shape, mesh = _shape(param), self.mesh
        if mesh.size == 1:
            return part.view(shape)
        # DeepSpeed's shards are already padded
        part = F.pad(part, (0, -(-shape.numel() // mesh.copies) - len(part)))
        parts = [torch.empty_like(part) for _ in range(mesh.size)] if mesh.is_first else None
        dist.gather(part, parts)
        if parts is None:
            return None
        shards = (torch.cat(parts[i :: mesh.tensor]) for i in range(mesh.tensor))
        return put_together([shard[: shape.numel()].view(shape) for shard in shards], param)


def _file(folder: str | Path, part: int) -> Path:
    return Path(folder) / f"moving_average_{part}.safetensors"


def _saved_files(folder: Path) -> list[Path]:
    """Returns the files of all ranks that saved the average. Every rank checks the first file, so that all
    raise the same error."""
    if not _file(folder, 0).exists():
        text = (
            f"the checkpoint {folder} has no moving average, and the weights of earlier steps are not "
            "known.\nResume without the flag, or start over with it."
        )
        raise UsageError(ErrorCode.OTHER_RUN, text, flag="--train.enable_ema")
    with safe_open(_file(folder, 0), "pt") as file:
        num_parts = int(file.metadata()["num_parts"])
    return [_file(folder, part) for part in range(num_parts)]


def _shape(param: Tensor) -> torch.Size:
    """Returns the shape of a parameter before ZeRO-3 sharded it."""
    return getattr(param, "ds_shape", param.shape)
