"""Compares two computations of a loss and its gradient, relative to the sizes of the terms that they add
up."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from openrlhf.tools.verify.layouts import TOTAL_LOSS, LayoutStep
from openrlhf.tools.verify.report import Finding, judged
from openrlhf.tools.verify.rounding import Rounding

FLOOR = 0.01
"""Lower limit of the norm by which the difference of a weight's gradients is divided. It is a fraction of the
norm that this gradient would have if all elements of all gradients had the same size. Some gradients are
exactly 0, such as those of key biases, and their computed values are rounding errors."""

PLAIN = 2
"""Largest multiple of the error of plain transformers that counts as rounding: two errors of equal size that
come from independent roundings, and one more for the luck of either."""

REPORT = "Report it with the file of this verification; until then do not trust results of this setup."


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
    """Copies loss and gradients of a step to the CPU, in float32."""
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
    """Returns the finding about the difference of two computations. `meaning`: text for a failure, its usual
    causes and what to do. `plain_error`: the difference that plain transformers makes by the same change,
    which counts if the model is more sensitive to rounding than the bound assumes."""
    error, where = largest_difference(difference, scale)
    bound, how = rounding.bound, f"{rounding}; relative to {scale.relative_to}"
    if PLAIN * plain_error > bound:
        bound = PLAIN * plain_error
        how = f"{PLAIN} x {plain_error:.2g}, the error of plain transformers in {rounding.dtype}: above {how}"
    return judged(check, claim, error, bound, how=how, where=where, meaning=meaning, seconds=seconds)


def largest_difference(difference: Difference, scale: Scale) -> tuple[float, str]:
    """Returns the largest relative difference of the loss or of the gradient of a weight, and its place."""
    if difference.missing:
        return math.inf, f"{difference.missing}, which only one of the two computations has"
    differences = {"the loss": difference.loss / max(scale.loss, difference.expected_loss, 1e-30)}
    for name, norm in difference.norms.items():
        differences[f"the gradient of {name}"] = norm / max(scale.weights[name], 1e-30)
    worst = max(
        differences, key=lambda place: math.inf if math.isnan(differences[place]) else differences[place]
    )
    return differences[worst], worst
