"""NF4, the 4-bit weights of QLoRA (https://arxiv.org/abs/2305.14314), of bitsandbytes."""

import torch
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.configurations import DTYPES


def nf4(dtype: str | None, config: PreTrainedConfig) -> dict[str, BitsAndBytesConfig]:
    """Returns transformers' option for QLoRA's 4-bit weights (https://arxiv.org/abs/2305.14314), with matrix
    products in `dtype`; None: in the dtype of the model's files."""
    in_type = (config.dtype or torch.float32) if dtype is None else DTYPES[dtype]
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=in_type,
        )
    }


def keep_nf4(model: PreTrainedModel) -> None:
    """Keeps bitsandbytes from repacking the weights permanently, with coarser scales, at the first evaluation
    on CPUs with bf16 products."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False
    if getattr(model, "is_loaded_in_4bit", False):
        check_nf4(model)


def check_nf4(model: PreTrainedModel) -> None:
    """Raises UsageError if bitsandbytes computes wrong 4-bit weights for a layer's input size on this
    machine, as its kernel for CPUs with AVX-512 does for some. Compares random weights of each input size
    with an NF4 of our own."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    states = {w.shape[-1]: w for p in model.parameters() if (w := getattr(p, "quant_state", None))}
    wrong: dict[int, float] = {}
    for size, state in states.items():
        random = torch.randn(128, size, generator=torch.Generator().manual_seed(0))
        weight = random.to(state.absmax.device, state.dtype)
        packed, of_packed = quantize_4bit(
            weight, blocksize=state.blocksize, quant_type=state.quant_type, compress_statistics=state.nested
        )
        weight, found = weight.float(), dequantize_4bit(packed, of_packed).float()
        right = round_to_nf4(weight, state.blocksize)
        if not (found - right).norm() < 0.5 * (right - weight).norm():
            wrong[size] = float((found - weight).norm() / weight.norm())
    if wrong:
        sizes = ", ".join(f"{size} inputs (relative error {e:.2f})" for size, e in sorted(wrong.items()))
        text = (
            f"bitsandbytes computes wrong 4-bit weights on this machine for layers of {sizes}, where NF4 has "
            "0.09.\nUse a GPU, a model whose sizes are multiples of 64, or remove the flag."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.load_in_4bit")


def round_to_nf4(weight: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Returns a float32 weight rounded to NF4 (https://arxiv.org/abs/2305.14314, appendix E): quantiles of
    the normal distribution, scaled to the largest absolute value of each block."""
    quantiles = lambda n: torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1])
    code = torch.cat([-quantiles(8), torch.zeros(1), quantiles(9).flip(0)]).to(weight) / quantiles(9).max()
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % blocksize)).view(-1, blocksize)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    rounded = code[torch.bucketize(blocks / scale, (code[1:] + code[:-1]) / 2)] * scale
    return rounded.flatten()[: weight.numel()].view_as(weight)
