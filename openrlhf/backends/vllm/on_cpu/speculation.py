"""Repairs speculative decoding on CPUs: in vLLM 0.32, the sampler that verifies draft tokens reads
uninitialised memory."""

from torch import Tensor
from vllm.v1.sample import rejection_sampler


def patch_sampler() -> None:
    """Replaces the function that expands temperature, top-k and top-p of requests to their draft tokens.
    vLLM's kernel for CPUs writes them to a copy instead of the tensor that the sampler reads."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Returns the value of each token's request, (num_tokens,).

    Args:
        x: value of each request, (requests,).
        cu_num_tokens: cumulative number of tokens of the requests, (requests,).
        num_tokens: number of tokens of all requests.
        replace_from: value to replace.
        replace_to: value that replaces it.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
