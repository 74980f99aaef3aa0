"""The critic's loss."""

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each action and whether the clip was active (bool), both (A,). V: `values`, G:
    `returns`.

    l_t = max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2) / 2
    """
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return torch.max(unclipped, clipped) / 2, clipped > unclipped
