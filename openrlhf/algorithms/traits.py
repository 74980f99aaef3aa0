"""What is known of an algorithm without torch: one row for each name that a flag takes.

Configuration, its checks and `--help` read these tables. The functions of the same names are in `advantages`,
`policy_loss`, `reduce`, `kl` and `correction`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    summary: str
    """What `--help` says of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator(Choice):
    """From the rewards of a step to the advantages of its actions."""

    needs_group: bool = False
    """Compares the samples of one prompt: what all of them earn alike teaches nothing."""
    needs_critic: bool = False
    """Reads values, and lambda."""
    discounts: bool = False
    """Reads gamma. The others credit every action with the whole outcome."""
    whiten: bool = False
    """Over all actions of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss(Choice):
    """What an action costs, given its advantage and how far the policy has moved."""

    ratio: Literal["token", "sequence"] = "token"
    """What the probability ratio is of, here and in the off-policy correction."""
    dual_clip: bool = True
    """Reads the bound for negative advantages."""

    @property
    def aggregation(self) -> str:
        """What it takes the mean over, unless something else is asked for."""
        return "sample_mean" if self.ratio == "sequence" else "token_mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class KLEstimate(Choice):
    has_gradient: bool
    """On average over the policy's samples. What has one suits the loss, what has none the reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction(Choice):
    drops_sequences: bool = False
    """Reads the bounds of a sequence's ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProximalPolicy(Choice):
    """What the probability ratio is relative to: the clip bounds how far the policy moves away from it."""

    needs_forward: bool = False
    """Is computed before the first update of a step, where it is not the policy itself."""
    is_sampler: bool = False
    """A correction for the gap between the two has nothing to weigh."""


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(summary="PPO with a critic", needs_critic=True, discounts=True, whiten=True),
    "reinforce": Estimator(summary="REINFORCE++", discounts=True, whiten=True),
    "rloo": Estimator(summary="minus the mean of the group's others", needs_group=True),
    "reinforce_baseline": Estimator(summary="minus the group's mean", needs_group=True, whiten=True),
    "group_norm": Estimator(summary="GRPO", needs_group=True),
    "dr_grpo": Estimator(summary="GRPO without division by the standard deviation", needs_group=True),
}

POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss(summary="clipped ratio of tokens"),
    "gspo": PolicyLoss(summary="clipped ratio of sequences", ratio="sequence"),
    "cispo": PolicyLoss(
        summary="log-probs weighted by the clipped ratio of tokens, so that every token keeps a gradient",
        dual_clip=False,
    ),
}

AGGREGATIONS: Mapping[str, Choice] = {
    "token_mean": Choice(summary="over tokens"),
    "sample_mean": Choice(summary="over samples, of each one's mean"),
    "constant_length": Choice(summary="over samples, of each one's sum / rollout.max_new_tokens (Dr. GRPO)"),
}

KL_ESTIMATORS: Mapping[str, KLEstimate] = {
    "k1": KLEstimate(summary="the log ratio, for the reward", has_gradient=False),
    "k2": KLEstimate(summary="half its square, for the loss", has_gradient=True),
    "k3": KLEstimate(summary="exp(-log ratio) - 1 + log ratio, for the loss", has_gradient=True),
}

CORRECTIONS: Mapping[str, Correction] = {
    "tis": Correction(summary="clip the weight of each token"),
    "icepop": Correction(summary="drop tokens outside the threshold"),
    "seq-mask-tis": Correction(summary="drop sequences, clip the tokens of the others", drops_sequences=True),
}

PROXIMAL_POLICIES: Mapping[str, ProximalPolicy] = {
    "recomputed": ProximalPolicy(summary="the policy before this step's update", needs_forward=True),
    "rollout": ProximalPolicy(summary="the sampler, which costs no forward pass", is_sampler=True),
    "interpolated": ProximalPolicy(
        summary="between sampler and policy, the closer to the policy the staler the action, without a "
        "forward pass (A-3PO)"
    ),
}
