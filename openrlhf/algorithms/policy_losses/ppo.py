from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.algorithms.tensor import Tensor


class PPO(PolicyLoss):
    """Proximal policy optimization (PPO): clipped ratio of tokens.

    Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347, eq. 7

        l_t = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    A bound is active where the clipped term is the smaller one: the lower one where A < 0, the upper one
    where A > 0. Such an action has no gradient. `--actor.dual_clip` > 1 bounds the loss where A < 0 by
    -dual_clip * A (https://arxiv.org/abs/1912.09729, eq. 5).
    """

    name = "ppo"
    dual_clip = True

    def __call__(self, row: RowView) -> tuple[Tensor, Tensor, Tensor]:
        ratio, advantages = row.log_ratio.exp(), row.advantages
        unclipped = ratio * advantages
        clipped = ratio.clamp(1 - row.clip_low, 1 + row.clip_high) * advantages
        objective = unclipped.minimum(clipped)
        if row.dual_clip is not None:
            bounded = objective.maximum(row.dual_clip * advantages)
            objective = bounded.where(advantages < 0, objective)
        active = clipped < unclipped
        return -objective, active & (advantages < 0), active & (advantages > 0)
