"""The memory and the products of a computation, as torch dispatches it."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Work(TorchDispatchMode):
    """Counts the bytes that are alive at once, beside those that were there, and the products of a head."""

    def __init__(self, head_size: int = 0) -> None:
        super().__init__()
        self.head_size, self.products = head_size, 0
        self.alive, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.products += a.shape[0] * a.shape[1] * b.shape[1] / self.head_size if self.head_size else 0
        own = {id(x.untyped_storage()) for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in self.known | own:
                self.count(x.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), id(storage)
        self.known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed() -> None:
            self.alive -= size
            self.known.discard(key)

        weakref.finalize(storage, freed)
