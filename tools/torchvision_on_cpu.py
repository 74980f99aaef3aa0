"""Lets a CUDA build of torchvision be imported where torch is built for the CPU. Standard library only.

`tools/environment.py` copies this file beside the packages of `.venv`, whose interpreters run it as they
start. What torchvision misses there is two operators that only its GPU library declares: they are declared
here, without a kernel, once it asks for them. Images are resized and read without them.
"""

import sys
from typing import Any


class DeclaresOperators:
    """Finds nothing; it acts just before torchvision speaks of its operators."""

    library: Any = None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision._meta_registrations" or cls.library is not None:
            return
        import torch

        if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclaresOperators)
