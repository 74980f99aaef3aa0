"""What sends weights to engines in the place of a model in training."""

from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf.models.checkpoint_layout import CheckpointLayout, checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.types import PackedRow, Sample


class Trainer:
    """What a sender asks of an engine in training."""

    def __init__(self, path: str, dtype: str) -> None:
        self.policy = PolicyModel(load_causal_lm(path, flag="--model", dtype=dtype, attention="eager")).eval()
        shapes = {name: tuple(t.shape) for name, t in checkpoint_tensors(self.policy.model).items()}
        self.layout = CheckpointLayout(self.policy.model, shapes)

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        tensors = {name: t.detach() for name, t in checkpoint_tensors(self.policy.model).items()}
        for conversion in self.layout.conversions:
            yield from self.layout.convert(conversion, tensors).items()

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.weights(0)]

    @torch.no_grad()
    def learn(self) -> None:
        """Weights that are nothing like the last ones."""
        for name, param in self.policy.model.named_parameters():
            if param.dim() > 1:
                param.copy_(param.flatten()[torch.randperm(param.numel())].view_as(param))
            elif "norm" in name:
                param.add_(0.1 * torch.randn_like(param))


def differences(policy: PolicyModel, token_ids: list[int], log_probs: list[float]) -> list[float]:
    """From what `policy` says of the last tokens, after all before them."""
    ids = torch.tensor(token_ids)
    is_action = torch.arange(len(ids)) >= len(ids) - len(log_probs)
    with torch.no_grad():
        expected = policy(PackedRow.of([Sample(token_ids=ids, action_mask=is_action)])).log_probs
    return (expected - torch.tensor(log_probs)).abs().tolist()
