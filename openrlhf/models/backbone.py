"""Hugging Face models on packed rows."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.models.attention import packing_kwargs
from openrlhf.types import PackedRow


@dataclass(slots=True)
class Reading:
    """How a model reads rows. models/self_check.py finds out which way is right."""

    flag: str = "auto"
    """`--ds.attn_implementation`, as the user gave it."""
    packed: bool = True
    """A row in one pass. Else one pass for each of its sequences: always right, and slower."""
    liger: bool = False
    """With Liger's kernels, `--ds.use_liger_kernel`."""


class RowModel(nn.Module):
    """Wraps `model` without renaming or copying a parameter: `.model.save_pretrained` exports it. What a
    subclass answers about a packed row is its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def reading_of(model: PreTrainedModel) -> Reading:
    """What models/loading.py noted on the model that it loaded."""
    return model.__dict__.setdefault("openrlhf_reading", Reading())


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model
    # The architecture misnames it: Llama 4's text model does.
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """(N, H): what the head of `model` would read at each token."""
    if reading_of(model).packed:
        return in_one_pass(model, row)
    return _one_by_one(model, row)


def in_one_pass(model: PreTrainedModel, row: PackedRow) -> Tensor:
    attention = model.config._attn_implementation
    assert attention is not None  # models/loading.py chose it
    packing = packing_kwargs(attention, row.lengths, row.token_ids.device)
    output = backbone_of(model)(
        input_ids=row.token_ids[None],
        position_ids=row.position_ids[None],
        # A cache makes transformers take the row for one sequence: attention would leak without an error.
        use_cache=False,
        **packing,
    )
    return output.last_hidden_state[0].to(model.dtype)  # Mamba keeps its residual in float32


def alone(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """(L,) one sequence -> (L, H), as transformers itself reads it."""
    output = backbone_of(model)(input_ids=token_ids[None], use_cache=False)
    return output.last_hidden_state[0].to(model.dtype)


def _one_by_one(model: PreTrainedModel, row: PackedRow) -> Tensor:
    num_passes = _most_sequences(model, row)
    hidden = torch.cat([alone(model, ids) for ids in row.token_ids.split(row.lengths)])
    for _ in range(num_passes - len(row.lengths)):
        hidden = hidden + 0 * alone(model, row.token_ids[:2]).sum()
    return hidden


def _most_sequences(model: PreTrainedModel, row: PackedRow) -> int:
    """In the row of any rank. Ranks that share their parameters gather them in every pass, forward and
    backward, so they must make the same number."""
    if not hasattr(next(model.parameters()), "ds_id"):
        return len(row.lengths)
    count = torch.tensor(len(row.lengths), device=row.token_ids.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)
