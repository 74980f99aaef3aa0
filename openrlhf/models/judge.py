"""Process reward models: a causal language model that is read at the placeholders themselves."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.models.backbone import RowModel, hidden_states
from openrlhf.models.policy import head_of, head_options
from openrlhf.types import PackedRow


class JudgeModel(RowModel):
    """What it says of a step is its prediction at the placeholder that ends the step."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head_options = head_options(model.config)

    def forward(self, row: PackedRow) -> Tensor:
        """(A, V) float32 logits at each action."""
        scale, softcap = self.head_options
        logits = head_of(self.model)(hidden_states(self.model, row)[row.action_mask]).float() * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
