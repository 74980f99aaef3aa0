"""What DPO and KTO compare a policy with: summed log-probs of answers, of the policy and of its reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algorithms.reductions import segment_sum
from openrlhf.types import PackedRow

Reference = Callable[[PackedRow], Tensor]
"""(A,) log-probs of a frozen model."""


def answer_log_probs(model: Callable, row: PackedRow) -> Tensor:
    """(B,) sum over each sequence's actions. `model` is a `models.policy.PolicyModel`."""
    return segment_sum(model(row, temperature=1.0, with_entropy=False).log_probs, row.num_actions)


def reference_log_probs(known: Tensor | None, reference: Reference | None, row: PackedRow) -> Tensor:
    """(B,) those known beforehand, or what `reference` says."""
    if known is not None:
        return known
    assert reference is not None  # cli/ builds one wherever they are not known beforehand
    with torch.no_grad():
        return segment_sum(reference(row), row.num_actions)
