"""Process reward models: causal language models that score steps at placeholder tokens."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.algorithms.logprobs import linear_logits
from openrlhf.models.backbone import RowModel, action_states
from openrlhf.models.policy import get_head, transformed_logits
from openrlhf.rows import PackedRow


class ProcessRewardModel(RowModel):
    """A process reward model. The model's prediction at the placeholder that ends a step scores the step."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        get_head(model).__class__ = LogitsHead  # changes only the class: ZeRO-3's hooks on the module stay

    def forward(self, row: PackedRow) -> Tensor:
        """Returns the logits at each action, (A, V) float32."""
        states = action_states(self.model, row, row.actions)
        return transformed_logits(states.whole(get_head(self.model)(states.hidden)), self.model.config)


class LogitsHead(nn.Linear):
    """A language model head that computes logits in float32, whatever the dtype of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return linear_logits(input, self.weight, self.bias)
