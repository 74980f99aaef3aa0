"""Checks of the trainer in one process: its loss and gradient equal those of transformers' own model, and do
not depend on the layout of the rows, on shared prefixes or, up to rounding, on the dtype."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from openrlhf.models.backbone import reading_of
from openrlhf.models.prefixes import tree_of
from openrlhf.types import PackedRow
from openrlhf.verification.compare import REPORT, Gradient, Scale, compared, on_cpu
from openrlhf.verification.formulas import plain_loss
from openrlhf.verification.layouts import ALL, LAYOUTS, ONE_BY_ONE, Found
from openrlhf.verification.plain import PlainGradient, plain_gradient
from openrlhf.verification.ranks import rank_checks
from openrlhf.verification.report import Finding, not_checked
from openrlhf.verification.rounding import Rounding
from openrlhf.verification.subjects import Running, Subject
from openrlhf.verification.timing import Clock

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


def number_of_checks(own_dtype: str) -> int:
    """Returns the number of findings of `trainer_checks` without those of several ranks."""
    return 2 + len(CLAIMS) + {"fp32": 0, "fp16": 1, "bf16": 2}[own_dtype]


def trainer_checks(subject: Subject, own_dtype: str, ranks: Path | None = None) -> Iterator[Finding]:
    """Yields the outcome of each check. The computations are in float32, where rounding is so small that
    defects show; then the run's own dtype is compared with them. `ranks`: folder for a job of several ranks,
    which also computes the gradient; None: no such job."""
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
    if ranks is not None:
        yield from rank_checks(subject, ranks, one_by_one, scale, rounding)


def dtype_checks(
    subject: Subject, dtype: str, expected: Gradient, scale: Scale, clock: Clock
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
