"""Speculative decoding on a CPU: a mistake of vLLM 0.32 in the sampler that checks proposals."""

from torch import Tensor
from vllm.v1.sample import rejection_sampler


def patch_sampler() -> None:
    """Makes vLLM's sampler read the temperature, top-k and top-p of requests with proposed tokens. vLLM's
    kernel for CPUs writes them into a copy, so that the sampler would read uninitialised memory."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Returns the value of each token's request, (num_tokens,). `x`: one value for each request, of which
    those equal to `replace_from` are read as `replace_to`; `cu_num_tokens`: number of tokens up to and with
    each request."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
