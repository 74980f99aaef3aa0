"""Comparison of two computations of a loss and its gradient, relative to what was added up in them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from openrlhf.verification.layouts import TOTAL_LOSS, Found
from openrlhf.verification.report import Finding, judged
from openrlhf.verification.rounding import Rounding

FLOOR = 0.01
"""Smallest gradient of a weight to which a difference is related, as a fraction of what the weight would have
if all elements of the gradient were of one size. Some gradients are exactly 0, such as those of key biases,
and what is computed of them is rounding."""

REPORT = "Report it with the file of this verification; until then do not trust results of this setup."


class Gradient(NamedTuple):
    """Loss and gradient of a step, on the CPU."""

    loss: float
    gradients: dict[str, Tensor]


class Scale(NamedTuple):
    """Sizes to which differences of the loss and of weights' gradients are relative."""

    loss: float
    weights: dict[str, float]

    @classmethod
    def of(cls, sizes: Mapping[str, float], shapes: Mapping[str, Tensor], loss: float) -> "Scale":
        """`sizes`: size of the gradient of each weight. See `FLOOR`."""
        count = sum(tensor.numel() for tensor in shapes.values())
        whole = math.sqrt(sum(size**2 for size in sizes.values()))
        floors = {name: FLOOR * whole * math.sqrt(t.numel() / count) for name, t in shapes.items()}
        return cls(abs(loss), {name: max(sizes[name], floor) for name, floor in floors.items()})


def on_cpu(step: Found) -> Gradient:
    gradients = {name: gradient.float().cpu() for name, gradient in step.gradients.items()}
    return Gradient(step.metrics[TOTAL_LOSS], gradients)


def compared(
    check: str,
    claim: str,
    found: Gradient,
    expected: Gradient,
    scale: Scale,
    rounding: Rounding,
    meaning: str,
    seconds: float,
) -> Finding:
    """Compares two computations of a loss and its gradient."""
    error, where = largest_difference(found, expected, scale)
    how = f"{rounding}; relative to the sum of the norms of the sequences' parts of a weight's gradient"
    return judged(check, claim, error, rounding.bound, how=how, where=where, meaning=meaning, seconds=seconds)


def largest_difference(found: Gradient, expected: Gradient, scale: Scale) -> tuple[float, str]:
    """Returns the largest relative difference of the loss or of the gradient of a weight, and its place."""
    if missing := found.gradients.keys() ^ expected.gradients.keys():
        return math.inf, f"{sorted(missing)[0]}, which only one of both has"
    differences = {"the loss": abs(found.loss - expected.loss) / max(scale.loss, abs(expected.loss), 1e-30)}
    for name, gradient in found.gradients.items():
        difference = float((gradient - expected.gradients[name]).norm())
        differences[f"the gradient of {name}"] = difference / max(scale.weights[name], 1e-30)
    worst = max(
        differences, key=lambda place: math.inf if math.isnan(differences[place]) else differences[place]
    )
    return differences[worst], worst
