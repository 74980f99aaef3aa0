"""The numbers that a run's models give for the actions of a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from openrlhf.backends.base import ModelRanks, Pending
from openrlhf.errors import ErrorCode, RunError
from openrlhf.types import Batch

# bounded .result(): the cluster's watchdog ends calls to processes that make no progress.


Forward = Pending[np.ndarray] | None
"""A model's forward pass of a batch; None for a model that the run has not, or whose numbers no one needs."""


def begin_forward(batch: Batch, models: Iterable[ModelRanks | None]) -> list[Forward]:
    """Begins the forward pass of each model, and does not wait for it."""
    return [model.forward(batch) if model else None for model in models]


def with_outputs(batch: Batch, passes: Sequence[Forward], step: int) -> Batch:
    """Returns the batch with the log-probs of policy, teacher and reference and the critic's values.
    `passes`: the forward passes of policy, critic, teacher and reference, in this order; the batch has no
    column of a model without one. Raises RunError for an output that is not finite."""
    answers = [p.result() if p else None for p in passes]
    log_probs, values, of_teacher, of_reference = answers
    for model, answer in zip(("policy", "critic", "teacher", "reference model"), answers, strict=True):
        if answer is not None and (bad := int((~np.isfinite(answer)).sum())):
            text = (
                f"step {step}: {bad} of {len(answer)} outputs of the {model} are not finite. Nothing was "
                "learned from them.\nLook at its weights and at the step's rollouts in the run folder."
            )
            raise RunError(ErrorCode.NOT_FINITE, text)
    return replace(
        batch, log_probs=log_probs, values=values, teacher_log_probs=of_teacher, ref_log_probs=of_reference
    )
