"""Bounds for the difference between two correct computations of the same gradient or log-prob.

Two correct computations differ by rounding alone: in another kernel, order of summation or row, each rounding
is another random number. n independent roundings of relative size at most u, the unit roundoff of the dtype,
add up to about u sqrt(n), and rarely to more than 5 times that (Higham and Mary, A New Approach to
Probabilistic Rounding Error Analysis, https://doi.org/10.1137/18M1226312).
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from openrlhf.models.loading import DTYPES

DEVIATIONS = 5
"""Multiple of the expected size of an error up to which a difference counts as rounding."""
ROUNDINGS = 20
"""Number of values of a layer that are rounded one after the other in a forward and a backward pass: norms,
projections, rotation, scores, softmax, sums of heads, residual sums, gate and product, and as many again."""
TF32 = 2.0**-11
"""Unit roundoff of the factors of float32 products on GPUs that round them to TF32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The roundings between the tokens of a sequence and a gradient."""

    dtype: str
    """fp32, bf16 or fp16."""
    layers: int
    longest_sum: int
    """Terms of the longest sum: width, width of the feed-forward layer, vocabulary or tokens."""

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: str, tokens: int) -> "Rounding":
        """Reads the sizes from a model's configuration. `tokens`: total tokens of the rows."""
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
        """Number of roundings. Sums are in float32 for every dtype, so a sum's terms count only in fp32."""
        return ROUNDINGS * (self.layers + 1) + (self.longest_sum if self.dtype == "fp32" else 0)

    @property
    def bound(self) -> float:
        """Largest relative difference that rounding explains."""
        return DEVIATIONS * self.unit * math.sqrt(self.roundings)

    def __str__(self) -> str:
        terms = f" + {self.longest_sum:,} (longest sum)" if self.dtype == "fp32" else ""
        return (
            f"{DEVIATIONS} x {self.unit:.2g} (unit roundoff of {self.dtype}) x sqrt({ROUNDINGS} x "
            f"({self.layers} layers + head){terms})"
        )
