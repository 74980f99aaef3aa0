"""Bounds for the difference between two correct computations of the same gradient or log-prob.

Two correct computations differ by rounding alone. Each rounding is a random number, which changes with the
kernel, the order of summation or the row. n independent roundings of relative size at most u, the unit
roundoff of the dtype, add up to about u sqrt(n), and rarely to more than 5 times that (Higham and Mary, A New
Approach to Probabilistic Rounding Error Analysis, https://doi.org/10.1137/18M1226312)."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from openrlhf.api import DTYPES

DEVIATIONS = 5
"""Largest multiple of the expected error u sqrt(n) that counts as rounding."""
ROUNDINGS = 20
"""Number of successive roundings of a value in a layer's forward and backward pass: norms, projections,
rotation, scores, softmax, sums of heads, residual sums, gate and product, and as many in the backward
pass."""
TF32 = 2.0**-11
"""Unit roundoff of TF32, to which some GPUs round the factors of float32 products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Number and size of the roundings between a sequence's tokens and a gradient."""

    dtype: str
    """fp32, bf16 or fp16."""
    layers: int
    longest_sum: int
    """Number of terms of the longest sum: hidden size, intermediate size, vocabulary or tokens."""

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: str, tokens: int) -> "Rounding":
        text = config.get_text_config()
        sizes = [getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "vocab_size")]
        sums = [size for size in sizes if isinstance(size, int)]
        layers = getattr(text, "num_hidden_layers", None) or 1
        return cls(dtype=dtype, layers=layers, longest_sum=max([*sums, tokens]))

    @property
    def unit(self) -> float:
        """Unit roundoff of the dtype, half its epsilon."""
        if self.dtype == "fp32" and torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32:
            return TF32
        return torch.finfo(DTYPES[self.dtype]).eps / 2

    @property
    def roundings(self) -> int:
        """Number of roundings. Sums are accumulated in float32 for every dtype, so their terms count only in
        fp32."""
        return ROUNDINGS * (self.layers + 1) + (self.longest_sum if self.dtype == "fp32" else 0)

    @property
    def bound(self) -> float:
        return DEVIATIONS * self.unit * math.sqrt(self.roundings)

    def __str__(self) -> str:
        terms = f" + {self.longest_sum:,} (longest sum)" if self.dtype == "fp32" else ""
        return (
            f"{DEVIATIONS} x {self.unit:.2g} (unit roundoff of {self.dtype}) x sqrt({ROUNDINGS} x "
            f"({self.layers} layers + head){terms})"
        )
