"""The objective of process reward models."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.token_loss import label_cross_entropy
from openrlhf.rows import LossNorm, StepsRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessObjective:
    """The mean over steps of the cross-entropy between prediction and label, over the whole vocabulary or
    over the reward tokens only."""

    reward_token_ids: tuple[int, ...] | None = None
    """Ids of the tokens that labels may be; None: any token. If labels are probabilities, there are two
    tokens, and a label is the probability of the first."""

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
