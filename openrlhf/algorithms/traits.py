"""Means and KL estimates by the names that flags take, without torch: configuration, its checks and `--help`
read these tables. Their functions are in `reductions` and `kl`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    summary: str
    """What `--help` says of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLEstimate(Choice):
    has_gradient: bool
    """On average over the policy's samples. What has one suits the loss, what has none the reward."""


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
