"""Compares two computations of a loss and its gradient, relative to the sizes of the terms that they add up.

Two correct computations differ by rounding alone. Each rounding is a random number, which changes with the
kernel, the order of summation or the row. n independent roundings of relative size at most u, the unit
roundoff of the dtype, add up to about u sqrt(n), and rarely to more than 5 times that (Higham and Mary, A New
Approach to Probabilistic Rounding Error Analysis, https://doi.org/10.1137/18M1226312)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from openrlhf.api import DTYPES
from openrlhf.tools.verify.layouts import TOTAL_LOSS, LayoutStep
from openrlhf.tools.verify.report import Finding, judged

FLOOR = 0.01
"""Lower limit of the norm by which the difference of a weight's gradients is divided. It is a fraction of the
norm that this gradient would have if all elements of all gradients had the same size. Some gradients are
exactly 0, such as those of key biases, and their computed values are rounding errors."""

PLAIN = 2
"""Largest multiple of the error of plain transformers that counts as rounding: two errors of equal size that
come from independent roundings, and one more for the luck of either."""

REPORT = "Report it with the file of this verification; until then do not trust results of this setup."
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


class Gradient(NamedTuple):
    """Loss and gradient of a step, on the CPU."""

    loss: float
    gradients: dict[str, Tensor]


class Difference(NamedTuple):
    """Difference between two computations of a loss and its gradient, without the gradients, which may be as
    large as the memory."""

    loss: float
    """Absolute difference of the losses."""
    expected_loss: float
    norms: dict[str, float]
    """Norm of the difference of each weight's gradients."""
    missing: str = ""
    """A weight of which only one of the two computations has a gradient; "" if there is none."""

    @classmethod
    def of(cls, found: Gradient, expected: Gradient) -> "Difference":
        missing = sorted(found.gradients.keys() ^ expected.gradients.keys())
        common = found.gradients.keys() & expected.gradients.keys()
        norms = {name: float((found.gradients[name] - expected.gradients[name]).norm()) for name in common}
        return cls(abs(found.loss - expected.loss), abs(expected.loss), norms, next(iter(missing), ""))


class Scale(NamedTuple):
    """Sizes by which differences of the loss and of weights' gradients are divided."""

    loss: float
    weights: dict[str, float]
    relative_to: str = "the norm of a weight's gradient"
    """Name of these sizes in reports."""

    @classmethod
    def of(cls, sizes: Mapping[str, float], shapes: Mapping[str, Tensor], loss: float, *more: str) -> "Scale":
        """`sizes`: size of the gradient of each weight, raised to `FLOOR`."""
        count = sum(tensor.numel() for tensor in shapes.values())
        whole = math.sqrt(sum(size**2 for size in sizes.values()))
        floors = {name: FLOOR * whole * math.sqrt(t.numel() / count) for name, t in shapes.items()}
        return cls(abs(loss), {name: max(sizes[name], floor) for name, floor in floors.items()}, *more)


def on_cpu(step: LayoutStep) -> Gradient:
    gradients = {name: gradient.float().cpu() for name, gradient in step.gradients.items()}
    return Gradient(step.metrics[TOTAL_LOSS], gradients)


def compared(
    check: str,
    claim: str,
    difference: Difference,
    scale: Scale,
    rounding: Rounding,
    meaning: str,
    seconds: float,
    plain_error: float = 0.0,
) -> Finding:
    """Returns the finding about the difference of two computations. `meaning`: usual causes of a failure, and
    what to try. `plain_error`: the difference that plain transformers makes by the same change,
    which counts if the model is more sensitive to rounding than the bound assumes."""
    error, where = largest_difference(difference, scale)
    bound, how = rounding.bound, f"{rounding}; relative to {scale.relative_to}"
    if PLAIN * plain_error > bound:
        bound = PLAIN * plain_error
        how = f"{PLAIN} x {plain_error:.2g}, the error of plain transformers in {rounding.dtype}: above {how}"
    meaning = f"{meaning} {REPORT}"
    return judged(check, claim, error, bound, how=how, where=where, meaning=meaning, seconds=seconds)


def largest_difference(difference: Difference, scale: Scale) -> tuple[float, str]:
    if difference.missing:
        return math.inf, f"{difference.missing}, which only one of the two computations has"
    differences = {"the loss": difference.loss / max(scale.loss, difference.expected_loss, 1e-30)}
    for name, norm in difference.norms.items():
        differences[f"the gradient of {name}"] = norm / max(scale.weights[name], 1e-30)
    worst = max(
        differences, key=lambda place: math.inf if math.isnan(differences[place]) else differences[place]
    )
    return differences[worst], worst
