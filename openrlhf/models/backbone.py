"""Hugging Face models on packed rows."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.models.attention import packing_kwargs
from openrlhf.types import PackedRow


class RowModel(nn.Module):
    """Wraps `model` without renaming or copying a parameter: `.model.save_pretrained` exports it. What a
    subclass answers about a packed row is its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """(N, H): what the head of `model` would read at each token."""
    attention = model.config._attn_implementation
    assert attention is not None  # models/loading.py chose it
    packing = packing_kwargs(attention, row.lengths, row.token_ids.device)
    output = model.base_model(
        input_ids=row.token_ids[None],
        position_ids=row.position_ids[None],
        # A cache makes transformers take the row for one sequence: attention would leak without an error.
        use_cache=False,
        **packing,
    )
    return output.last_hidden_state[0]
