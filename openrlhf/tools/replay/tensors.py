"""Compares checkpoints of one model tensor by tensor, for any backend and number of ranks."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from openrlhf.api import MANIFEST_FILE as MANIFEST
from openrlhf.api import TORCH_METADATA as METADATA
from openrlhf.api import Manifest, TorchReader, load_tensors
from openrlhf.tools.replay.differences import Compared

NOT_TENSORS = ("origin.json", "metric.json", "random_state_")
"""Prefixes of names of checkpoint files without tensors of the model."""


def compare_checkpoints(a: Path, b: Path, *, reads: bool = False) -> Iterator[Compared]:
    """Yields the comparison of each tensor (weights and optimizer states), in the order of the first
    checkpoint. If `reads` is False and the recorded hashes are equal, reads and yields nothing."""
    if not reads and have_same_hashes(a, b):
        return
    stored, others = stored_tensors(a), stored_tensors(b)
    for name in dict.fromkeys([*stored, *others]):
        if name in stored and name in others:
            yield compare_tensors(name, stored[name](), others[name]())
        else:
            yield Compared(
                quantity=name, first="only in the first" if name in stored else "only in the second"
            )


def have_same_hashes(a: Path, b: Path) -> bool:
    """Returns True if two manifests have equal hashes of the same files, but for those without tensors."""
    if not all((folder / MANIFEST).is_file() for folder in (a, b)):
        return False
    listed = [
        {
            name: entry
            for name, entry in Manifest.read(folder).files.items()
            if not name.startswith(NOT_TENSORS)
        }
        for folder in (a, b)
    ]
    return listed[0] == listed[1]


def stored_tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Returns name -> function that reads the tensor, for all trained weights and optimizer states of a
    checkpoint. Raises UsageError if the files of a rank are missing."""
    return _read_torch(folder) if (folder / METADATA).is_file() else _read_deepspeed(folder)


def _read_torch(folder: Path) -> dict[str, Callable[[], Tensor]]:
    def read(name: str, about: TensorStorageMetadata) -> Tensor:
        found = {name: torch.zeros(about.size, dtype=about.properties.dtype)}
        with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
            load_tensors(folder, found, no_dist=True)
        return found[name]

    known = TorchReader(folder).read_metadata().state_dict_metadata
    return {
        n: partial(read, n, about) for n, about in known.items() if isinstance(about, TensorStorageMetadata)
    }


def _read_deepspeed(folder: Path) -> dict[str, Callable[[], Tensor]]:
    from openrlhf.api import DEEPSPEED_MASTER as MASTER  # DeepSpeed may be missing
    from openrlhf.api import DEEPSPEED_ORDER as ORDER
    from openrlhf.api import DeepSpeedCheckpoint as Checkpoint

    found: dict[str, Callable[[], Tensor]] = {}
    tensor_ranks = max(1, len([*folder.glob("mp_rank_*_model_states.pt")]))
    for rank in range(tensor_ranks):
        checkpoint = Checkpoint(folder, rank)
        saved = checkpoint.states(checkpoint.model_states()[ORDER])
        part = f" of tensor-parallel rank {rank}" if tensor_ranks > 1 else ""
        for key in (
            MASTER,
            *sorted({key for own in saved.fragments.values() for key in own[0].vectors} - {MASTER}),
        ):
            for name in saved.fragments:
                if key in saved.fragments[name][0].vectors:
                    full = f"{'weights' if key == MASTER else key}.{name}{part}"
                    found[full] = partial(saved.read, name, key, 0, saved.numel(name))
    return found


def compare_tensors(name: str, a: Tensor, b: Tensor) -> Compared:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Compared(quantity=name, first=f"{a.dtype} {tuple(a.shape)} | {b.dtype} {tuple(b.shape)}")
    one, other = (t.contiguous().flatten().view(torch.uint8).reshape(t.numel(), -1) for t in (a, b))
    places = (one != other).any(1).nonzero().flatten()
    if not len(places):
        return Compared(quantity=name)
    i = int(places[0])
    index = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), a.shape)) if a.ndim else ()
    values = f"{a.flatten()[i].item()!r} | {b.flatten()[i].item()!r}"
    return Compared(
        quantity=name,
        first=f"element {list(index)}: {values}" if index else values,
        number=f"{len(places)} of {a.numel()} elements",
        largest=float((a.detach().double() - b.detach().double()).abs().max()),
    )
