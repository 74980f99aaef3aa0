"""Whether bitsandbytes computes right 4-bit weights on this machine."""

import pytest
import torch
from bitsandbytes import functional

from openrlhf.models.loading import round_to_nf4


def is_right(size: int) -> bool:
    """Tells whether weights of a layer with `size` inputs are those of NF4."""
    weight = torch.randn(128, size, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    off = (functional.dequantize_4bit(packed, state) - round_to_nf4(weight, 64)).norm()
    return bool(off < 0.1 * weight.norm())


RIGHT = all(map(is_right, (32, 96, 160)))
"""False on CPUs with AVX-512: for rows with half a block, bitsandbytes' kernel takes a wrong scale."""

right_weights = pytest.mark.skipif(not RIGHT, reason="bitsandbytes computes wrong weights; runs refuse it")
"""Mark of tests that train models in four bits."""
