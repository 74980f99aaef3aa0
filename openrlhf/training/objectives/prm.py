"""Process reward models: a label for every step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.token_loss import label_cross_entropy
from openrlhf.types import LossNorm, StepsRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessObjective:
    """Mean cross-entropy over all steps, of the whole vocabulary or of the reward tokens alone."""

    reward_token_ids: tuple[int, ...] | None = None
    """Tokens that a step's label may be. Labels that are probabilities belong to the first of two tokens."""

    def __call__(self, model: Callable, batch: StepsRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.process_reward.ProcessRewardModel`, possibly wrapped by an engine."""
        logits, labels = model(batch.row), batch.labels
        if self.reward_token_ids is not None:
            tokens = torch.tensor(self.reward_token_ids).to(logits.device, non_blocking=True)
            logits = logits[:, tokens]
            if not labels.is_floating_point():
                labels = (labels[:, None] == tokens).int().argmax(1)
        loss = label_cross_entropy(logits, labels).sum() / norm.num_tokens
        classes = (labels < 0.5).long() if labels.is_floating_point() else labels
        is_right = logits.argmax(-1) == classes
        return loss, {"prm/loss": loss.detach(), "prm/accuracy": is_right.sum() / norm.num_tokens}
