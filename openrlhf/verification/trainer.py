"""Checks of the trainer in one process: its loss and gradient equal those of transformers' own model, and do
not depend on the layout of the rows, on shared prefixes or, up to rounding, on the dtype."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf.models.backbone import reading_of
from openrlhf.models.prefixes import tree_of
from openrlhf.types import PackedRow
from openrlhf.verification.formulas import plain_loss
from openrlhf.verification.layouts import LAYOUTS, TOTAL_LOSS, Found
from openrlhf.verification.plain import PlainGradient, plain_gradient
from openrlhf.verification.report import Finding, judged, not_checked
from openrlhf.verification.rounding import Rounding
from openrlhf.verification.subjects import Running, Subject

ONE_BY_ONE, ALL = "one by one", "all in a row"
FLOOR = 0.01
"""Smallest gradient of a weight to which a difference is related, as a fraction of what the weight would have
if all elements of the gradient were of one size. Some gradients are exactly 0, such as those of key biases,
and what is computed of them is rounding."""

CLAIMS: Mapping[str, tuple[str, str, str]] = {
    "shuffled, three in a row": (
        "micro-batches and order",
        "Loss and gradient do not depend on the micro-batch size and the order of the rows",
        "The loss divides by what is in a row instead of by the step's totals, or a row's data follow "
        "another order than its tokens.",
    ),
    "300 tokens in a row": (
        "token budget",
        "Loss and gradient do not depend on how rows are filled by --train.max_tokens_per_gpu",
        "The loss divides by what is in a row, or sequences of a row change one another.",
    ),
    ALL: (
        "packing",
        "Loss and gradient of sequences in one packed row are those of each sequence alone",
        "Attention crosses the borders of sequences, or positions do not start again at each. Try "
        "--ds.attn_implementation eager.",
    ),
}
"""Layout -> (name of the check, claim, usual causes of a failure)."""
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


def number_of_checks(own_dtype: str) -> int:
    """Returns the number of findings of `trainer_checks`."""
    return 2 + len(CLAIMS) + {"fp32": 0, "fp16": 1, "bf16": 2}[own_dtype]


def trainer_checks(subject: Subject, own_dtype: str) -> Iterator[Finding]:
    """Yields the outcome of each check. The computations are in float32, where rounding is so small that
    defects show; then the run's own dtype is compared with them."""
    clock = Clock()
    with subject.running("fp32") as running:
        found: dict[str, Gradient] = {}
        last: Found | None = None
        for step in running.steps(LAYOUTS):
            found[step.layout], last = on_cpu(step), step
        assert last is not None
        row = getattr(last.rows[0], "row", last.rows[0])
        items, objective, unshared = running.items, last.objective, unshared_gradient(running, row)
        model_config = running.engine.module.model.config
    seconds_of_layouts = clock.lap() / (len(LAYOUTS) + 1)
    rounding = Rounding.of(model_config, "fp32", sum(row.lengths))
    plain, why = plain_of(subject, items, objective)
    one_by_one = found[ONE_BY_ONE]
    claim = "Loss and gradient equal those of plain transformers, one sequence at a time"
    if plain is None:
        sizes = {name: float(g.norm()) for name, g in one_by_one.gradients.items()}
        scale = Scale.of(sizes, one_by_one.gradients, one_by_one.loss)
        yield not_checked("plain transformers", claim, why)
    else:
        scale = Scale.of(plain.added, plain.gradients, plain.loss_added)
        expected = Gradient(plain.loss, plain.gradients)
        causes = (
            "Another formula, mask of actions, temperature or weight than that of the run's flags; or a "
            "forward pass that computes the model in another way than transformers does."
        )
        meaning = f"{causes} {REPORT}"
        yield compared(
            "plain transformers", claim, one_by_one, expected, scale, rounding, meaning, clock.lap()
        )
    for layout, (name, statement, causes) in CLAIMS.items():
        meaning = f"{causes} {REPORT}"
        arguments = (found[layout], one_by_one, scale, rounding, meaning, seconds_of_layouts)
        yield compared(name, statement, *arguments)
    statement = "Common prefixes that are read once give the gradient of sequences that are read whole"
    if unshared is None:
        yield not_checked(
            "common prefixes", statement, "this model reads each sequence whole (or no two begin alike)"
        )
    else:
        meaning = f"Set --ds.share_prefixes false. {REPORT}"
        arguments = (found[ALL], unshared, scale, rounding, meaning, seconds_of_layouts)
        yield compared("common prefixes", statement, *arguments)
    if own_dtype != "fp32":
        yield from dtype_checks(subject, own_dtype, one_by_one, scale, clock)


def dtype_checks(
    subject: Subject, dtype: str, expected: Gradient, scale: Scale, clock: "Clock"
) -> Iterator[Finding]:
    """Compares the run's own dtype with float32."""
    statement = f"In {dtype}, loss and gradient are those of float32 up to rounding"
    if dtype == "fp16":
        why = "gradients in fp16 have a scale that changes from step to step"
        yield not_checked(f"dtype {dtype}", statement, why)
        return
    clock.lap()
    with subject.running(dtype) as running:
        found = {step.layout: on_cpu(step) for step in running.steps([ONE_BY_ONE, ALL])}
        rounding = Rounding.of(running.engine.module.model.config, dtype, 0)
    seconds = clock.lap() / 2
    meaning = (
        "The kernels of this dtype compute something else, or the model is unusually sensitive to rounding: "
        f"compare with --ds.attn_implementation eager and with --ds.param_dtype fp32. {REPORT}"
    )
    names = {ONE_BY_ONE: f"dtype {dtype}", ALL: f"dtype {dtype}, packed"}
    for layout, gradient in found.items():
        yield compared(names[layout], statement, gradient, expected, scale, rounding, meaning, seconds)


def plain_of(subject: Subject, items: Any, objective: Any) -> tuple[PlainGradient | None, str]:
    """Returns loss and gradient of transformers' own model; or None, and why there is no such comparison."""
    if subject.why_no_plain_model:
        return None, subject.why_no_plain_model
    with torch.no_grad():
        plain = plain_loss(objective, items, subject.reference())
    if plain is None:
        return None, f"there is no plain formula of {type(objective).__name__}"
    subject.notes["formula"] = plain.formula
    answer = subject.answer(plain.entropy, plain.temperature)
    return plain_gradient(subject.plain_model(), plain, answer), ""


def unshared_gradient(running: Running, row: PackedRow) -> Gradient | None:
    """Returns the step with all items in a row, `row`, without shared prefixes; None if it shares none."""
    if not running.engine.trains_on_prefixes or tree_of(row, with_routing=False) is None:
        return None
    reading = reading_of(running.engine.module.model)
    reading.shares_prefixes = False
    try:
        (step,) = running.steps([ALL])
        return on_cpu(step)
    finally:
        reading.shares_prefixes = True


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


class Clock:
    """Measures the seconds between calls."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return seconds
