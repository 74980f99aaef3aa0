"""Checks of the trainer in one process: its loss and gradient equal those of transformers' own model, and do
not depend on the layout of the rows, on shared prefixes or, up to rounding, on the dtype."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from openrlhf.api import DTYPES, PackedRow, build_tree, get_row_layout
from openrlhf.tools.reference.objectives import plain_loss
from openrlhf.tools.verify.compare import (
    Difference,
    Gradient,
    Rounding,
    Scale,
    compared,
    largest_difference,
    on_cpu,
)
from openrlhf.tools.verify.layouts import ALL, LAYOUTS, ONE_BY_ONE
from openrlhf.tools.verify.plain import PlainGradient, plain_gradient
from openrlhf.tools.verify.ranks import rank_checks
from openrlhf.tools.verify.report import Clock, Finding, not_checked
from openrlhf.tools.verify.subjects import Running, Subject

CLAIMS: Mapping[str, tuple[str, str, str]] = {
    "shuffled, three in a row": (
        "micro-batches and order",
        "Loss and gradient do not depend on the micro-batch size and the order of the rows",
        "The loss divides by a row's totals instead of the step's, or a row's data are in another order than "
        "its tokens.",
    ),
    "300 tokens in a row": (
        "token budget",
        "Loss and gradient do not depend on how rows are filled by --train.max_tokens_per_gpu",
        "The loss divides by a row's totals instead of the step's, or sequences of a row affect each other.",
    ),
    ALL: (
        "packing",
        "Loss and gradient of sequences in one packed row are those of each sequence alone",
        "Attention crosses the boundaries of sequences, or positions do not restart at each sequence. Try "
        "--ds.attn_implementation eager.",
    ),
}
"""Layout -> (name of the check, claim, usual causes of a failure)."""


def number_of_checks(own_dtype: str) -> int:
    return 2 + len(CLAIMS) + {"fp32": 0, "fp16": 1, "bf16": 2}[own_dtype]


def trainer_checks(subject: Subject, own_dtype: str, ranks: Path | None = None) -> Iterator[Finding]:
    """Yields the outcome of each check. Computes in float32, in which rounding is too small to hide defects,
    then compares the run's own dtype with these results. `ranks`: scratch folder of a job of several ranks
    that computes the gradient too; None: no such job."""
    clock = Clock()
    with subject.running("fp32") as running:
        differences: dict[str, Difference] = {}
        layouts = running.steps(LAYOUTS)
        step = next(layouts)
        assert step.layout == ONE_BY_ONE
        one_by_one = on_cpu(step)
        for step in layouts:
            differences[step.layout] = Difference.of(on_cpu(step), one_by_one)
        row = getattr(step.rows[0], "row", step.rows[0])
        items, objective = running.items, step.objective
        of_prefixes = difference_of_prefixes(running, row, on_cpu(step))
        del step
        model_config = running.engine.module.model.config
    seconds_of_layouts = clock.lap() / (len(LAYOUTS) + 1)
    rounding = Rounding.of(model_config, "fp32", sum(row.lengths))
    plain, why = compute_plain(subject, items, objective, "fp32")
    plain_error = 0.0
    claim = "Loss and gradient equal those of plain transformers, one sequence at a time"
    if plain is None:
        sizes = {name: float(g.norm()) for name, g in one_by_one.gradients.items()}
        scale = Scale.of(sizes, one_by_one.gradients, one_by_one.loss)
        yield not_checked("plain transformers", claim, why)
    else:
        relative_to = "the sum over the sequences of the norm of each one's part of a weight's gradient"
        scale = Scale.of(plain.added, plain.gradients, plain.loss_added, relative_to)
        expected = Gradient(plain.loss, plain.gradients)
        difference = Difference.of(one_by_one, expected)
        if own_dtype == "bf16":
            plain_error = error_of_plain(subject, items, objective, own_dtype, expected, scale)
        del plain, expected
        causes = (
            "The formula, the mask of actions, the temperature or a weight of the loss is not that of the "
            "run's flags; or the forward pass differs from that of transformers."
        )
        yield compared("plain transformers", claim, difference, scale, rounding, causes, clock.lap())
    for layout, (name, statement, causes) in CLAIMS.items():
        yield compared(name, statement, differences[layout], scale, rounding, causes, seconds_of_layouts)
    statement = "Sequences whose common prefix is computed once have the gradient of sequences computed whole"
    name, causes = "common prefixes", "Set --ds.share_prefixes false."
    if of_prefixes is None:
        why = "this model computes each sequence whole, or no two sequences begin alike"
        yield not_checked(name, statement, why)
    else:
        yield compared(name, statement, of_prefixes, scale, rounding, causes, seconds_of_layouts)
    if own_dtype != "fp32":
        yield from dtype_checks(subject, own_dtype, one_by_one, scale, plain_error, clock)
    if ranks is not None:
        yield from rank_checks(subject, ranks, one_by_one, scale, rounding)


def dtype_checks(
    subject: Subject, dtype: str, expected: Gradient, scale: Scale, plain_error: float, clock: Clock
) -> Iterator[Finding]:
    """Compares the run's own dtype with float32. `plain_error`: see `compared`."""
    statement = f"In {dtype}, loss and gradient are those of float32 up to rounding"
    if dtype == "fp16":
        why = "the loss scale of fp16, and so its gradients, change from step to step"
        yield not_checked(f"dtype {dtype}", statement, why)
        return
    clock.lap()
    with subject.running(dtype) as running:
        found = {
            step.layout: Difference.of(on_cpu(step), expected) for step in running.steps([ONE_BY_ONE, ALL])
        }
        rounding = Rounding.of(running.engine.module.model.config, dtype, 0)
    seconds = clock.lap() / 2
    meaning = (
        "The kernels of this dtype are wrong. Compare with "
        "--ds.attn_implementation eager and with --ds.param_dtype fp32."
    )
    names = {ONE_BY_ONE: f"dtype {dtype}", ALL: f"dtype {dtype}, packed"}
    for layout, difference in found.items():
        yield compared(names[layout], statement, difference, scale, rounding, meaning, seconds, plain_error)


def error_of_plain(
    subject: Subject, items: Any, objective: Any, dtype: str, expected: Gradient, scale: Scale
) -> float:
    """Returns by how much the gradient of transformers' own model changes in `dtype`. Models differ: where
    values cancel, or a router chooses, a rounding moves a gradient further than its own size."""
    found, why = compute_plain(subject, items, objective, dtype)
    assert found is not None, why
    return largest_difference(Difference.of(Gradient(found.loss, found.gradients), expected), scale)[0]


def compute_plain(
    subject: Subject, items: Any, objective: Any, dtype: str
) -> tuple[PlainGradient | None, str]:
    """Returns loss and gradient of transformers' own model in `dtype`, or None; and the reason why, or ""."""
    if subject.why_no_plain_model:
        return None, subject.why_no_plain_model
    with torch.no_grad():
        plain = plain_loss(objective, items, subject.reference(), subject.config)
    if plain is None:
        return None, f"there is no plain formula of {type(objective).__name__}"
    subject.notes["formula"] = plain.formula
    output = subject.output(plain.entropy, plain.temperature)
    return plain_gradient(subject.plain_model().to(DTYPES[dtype]), plain, output), ""


def difference_of_prefixes(running: Running, row: PackedRow, shared: Gradient) -> Difference | None:
    """Repeats the step with all items in one row, with each sequence computed whole. `row`: this row.
    `shared`: its gradient with common prefixes. Returns None if its sequences share no prefix."""
    if not running.engine.trains_on_prefixes or build_tree(row, with_routing=False) is None:
        return None
    layout = get_row_layout(running.engine.module.model)
    layout.shares_prefixes = False
    try:
        (step,) = running.steps([ALL])
        return Difference.of(shared, on_cpu(step))
    finally:
        layout.shares_prefixes = True
