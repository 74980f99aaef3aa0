"""The memory that a pass of a model keeps for its backward pass."""

import torch
import transformers as hf
from torch import Tensor

from openrlhf.models.backbone import hidden_states
from openrlhf.rows import PackedRow, Sample

TOKENS = 256


def kept_bytes(model: hf.PreTrainedModel) -> int:
    """Returns the bytes that a pass keeps for the backward pass, beside the weights."""
    found = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
        return x

    sample = Sample(token_ids=torch.arange(TOKENS) % 60, action_mask=torch.arange(TOKENS) > 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden_states(model, PackedRow.of([sample]))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for place, (size, _) in found.items() if place not in weights)
