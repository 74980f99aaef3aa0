"""An exponential moving average of a model's weights over the optimizer steps of a run.

It often does better than the last weights, because it averages out the noise of single steps
(https://arxiv.org/abs/1803.05407, https://arxiv.org/abs/1909.13719).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from openrlhf.engine.distributed import ProcessMesh, current_device


class MovingAverage:
    """One rank's part of the average: p_mean <- beta * p_mean + (1 - beta) * p for each trained parameter p.

    It is float32 on the CPU, whatever the weights are and wherever they are at the moment. In one part data
    parallel rank 0 has whole parameters, and the others have nothing. With a part for each of them, at ZeRO
    stage 3, a rank averages the shards that it keeps anyway, so that a step needs no communication.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        beta: float,
        mesh: ProcessMesh,
        sharded: bool,
    ) -> None:
        """It starts from the weights of this moment. `sharded`: at ZeRO stage 3."""
        self.beta, self.mesh, self.num_parts = beta, mesh, mesh.data if sharded else 1
        has_part = mesh.data_rank < self.num_parts
        self.parameters = {name: param for name, param in parameters if param.requires_grad and has_part}
        self.parts = {name: _own_part(param).clone() for name, param in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """The weights have made a step."""
        for name, part in self.parts.items():
            part.lerp_(_own_part(self.parameters[name]), 1 - self.beta)

    def in_full(self) -> Iterator[tuple[str, Tensor]]:
        """(name, average in the shape and dtype of the parameter) on data parallel rank 0, and nothing
        elsewhere. All ranks must iterate together: with several parts each parameter is a collective."""
        for name, part in self.parts.items():
            param = self.parameters[name]
            whole = part.to(param.dtype)
            if hasattr(param, "ds_tensor"):
                whole = _joined(whole.to(current_device()), param, self.mesh)
            if whole is not None:
                yield name, whole

    def save(self, folder: str | Path) -> None:
        """Write this rank's part, if it has one, into a checkpoint's folder."""
        if self.parts and self.mesh.leads:
            save_file(self.parts, _file(folder, self.mesh.data_rank), {"num_parts": str(self.num_parts)})

    def load(self, folder: str | Path) -> None:
        """Continue with exactly what `save` wrote. Raises ValueError, on every rank, where the folder has no
        average or one in another number of parts."""
        _check_parts(Path(folder), self.num_parts)
        if self.parts:
            with safe_open(_file(folder, self.mesh.data_rank), "pt") as file:
                self.parts = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _own_part(param: nn.Parameter) -> Tensor:
    """The shard of a parameter at ZeRO stage 3, else all of it: float32 on the CPU."""
    return getattr(param, "ds_tensor", param).detach().cpu().float()


def _joined(shard: Tensor, param: nn.Parameter, mesh: ProcessMesh) -> Tensor | None:
    """All shards of a parameter as one tensor on data parallel rank 0. DeepSpeed pads the last one."""
    shards = [torch.empty_like(shard) for _ in range(mesh.data)] if mesh.data_rank == 0 else None
    dist.gather(shard, shards, group=mesh.data_group, group_dst=0)
    if shards is None:
        return None
    shape = getattr(param, "ds_shape")  # noqa: B009  DeepSpeed puts it there
    return torch.cat(shards)[: shape.numel()].view(shape)


def _file(folder: str | Path, part: int) -> Path:
    return Path(folder) / f"moving_average_{part}.safetensors"


def _check_parts(folder: Path, num_parts: int) -> None:
    """Every rank reads the first part's file, so that all of them raise together."""
    if not _file(folder, 0).exists():
        raise ValueError(
            f"--train.enable_ema: the checkpoint {folder} was saved without a moving average,\n"
            "and the steps before it cannot be made up for. Resume without the flag, or start over with it."
        )
    with safe_open(_file(folder, 0), "pt") as file:
        found = int(file.metadata()["num_parts"])
    if found != num_parts:
        raise ValueError(
            f"--ckpt.load_enable: the moving average in {folder} has {found} part(s), and that of this run "
            f"{num_parts}: one, or at --ds.zero_stage 3 one for each GPU of the actor.\n"
            "Resume with the ZeRO stage and the number of GPUs that it was saved with."
        )
