"""Defines named algorithms as combinations of independent choices, and prints the table of
docs/algorithms.md: `python tools/named_algorithms.py`."""

from dataclasses import dataclass
from typing import Any, Literal

from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.config.fields import flag_values, list_flags, to_words
from openrlhf.config.ppo import (
    EstimatorName,
    ISCorrectionType,
    KLEstimator,
    LossAggregation,
    PolicyLossType,
    PPOConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """A penalty for the KL to the reference model."""

    place: Literal["reward", "loss"]
    estimator: KLEstimator
    coef: float = 0.01


IN_REWARD = KLPenalty(place="reward", estimator="k1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """An algorithm by the choices that it makes."""

    name: str
    paper: str
    advantage: EstimatorName
    policy_loss: PolicyLossType = "ppo"
    clip: tuple[float, float] = (0.2, 0.2)
    """Maximum distances of the ratio below and above 1."""
    aggregation: LossAggregation = "token_mean"
    kl: KLPenalty | None = None
    correction: ISCorrectionType | None = None
    filters_groups: bool = False
    overlong_buffer: float | None = None
    """Number of tokens before the length limit in which the length penalty grows; None: no penalty."""

    @property
    def settings(self) -> dict[str, Any]:
        """Key of a flag -> its value, for all choices."""
        low, high = self.clip
        is_usual_mean = self.aggregation == POLICY_LOSSES[self.policy_loss].aggregation()
        settings: dict[str, Any] = {
            "algo.advantage.estimator": self.advantage,
            "actor.policy_loss_type": self.policy_loss,
            "actor.eps_clip" if low == high else "actor.eps_clip_low_high": low if low == high else self.clip,
            "actor.loss_aggregation": None if is_usual_mean else self.aggregation,
            "algo.dynamic_filtering_enable": self.filters_groups,
            "reward.overlong_buffer_len": self.overlong_buffer,
            "algo.kl.init_coef": self.kl.coef if self.kl else 0.0,
        }
        if self.kl:
            settings |= {
                "algo.kl.use_loss": self.kl.place == "loss",
                "algo.kl.estimator": self.kl.estimator,
            }
        if self.correction:
            settings |= {
                "algo.advantage.is_correction_enable": True,
                "algo.advantage.is_correction_type": self.correction,
            }
        return settings

    @property
    def flags(self) -> list[str]:
        """Words of the command line that select the algorithm: the settings that differ from the defaults."""
        fields, defaults = list_flags(PPOConfig), flag_values(PPOConfig())
        words = []
        for key, value in self.settings.items():
            if value != defaults[key]:
                words += [f"--{key}", *(() if fields[key].is_bool else to_words(value))]
        return words


_REINFORCE_PP = "https://arxiv.org/abs/2501.03262"

ALGORITHMS = (
    Algorithm(name="PPO", paper="https://arxiv.org/abs/1707.06347", advantage="gae", kl=IN_REWARD),
    Algorithm(name="REINFORCE++", paper=_REINFORCE_PP, advantage="reinforce", kl=IN_REWARD),
    Algorithm(
        name="REINFORCE++-baseline",
        paper=_REINFORCE_PP,
        advantage="reinforce_baseline",
        kl=KLPenalty(place="loss", estimator="k2"),
    ),
    Algorithm(name="RLOO", paper="https://arxiv.org/abs/2402.14740", advantage="rloo", kl=IN_REWARD),
    Algorithm(
        name="GRPO",
        paper="https://arxiv.org/abs/2402.03300",
        advantage="group_norm",
        aggregation="sample_mean",
        kl=KLPenalty(place="loss", estimator="k3", coef=0.04),
    ),
    Algorithm(
        name="Dr. GRPO",
        paper="https://arxiv.org/abs/2503.20783",
        advantage="dr_grpo",
        aggregation="constant_length",
    ),
    Algorithm(
        name="DAPO",
        paper="https://arxiv.org/abs/2503.14476",
        advantage="group_norm",
        clip=(0.2, 0.28),
        filters_groups=True,
        overlong_buffer=4096,
    ),
    Algorithm(
        name="GSPO",
        paper="https://arxiv.org/abs/2507.18071",
        advantage="group_norm",
        policy_loss="gspo",
        clip=(3e-4, 4e-4),
        aggregation="sample_mean",
    ),
    Algorithm(
        name="CISPO",
        paper="https://arxiv.org/abs/2506.13585",
        advantage="group_norm",
        policy_loss="cispo",
        clip=(1.0, 4.0),
    ),
    Algorithm(
        name="REINFORCE++ with TIS",
        paper="https://fengyao.notion.site/off-policy-rl",
        advantage="reinforce",
        kl=IN_REWARD,
        correction="tis",
    ),
)


def table() -> str:
    """Returns a Markdown table: one row per algorithm, one column per choice."""
    head = ("", "advantage", "loss", "ratio of", "clip", "mean", "KL", "correction", "also", "flags")
    rows = [head, *(_cells(algorithm) for algorithm in ALGORITHMS)]
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return first + "|---" * len(head) + "|\n" + "".join(others)


def _cells(algorithm: Algorithm) -> tuple[str, ...]:
    low, high = algorithm.clip
    kl = algorithm.kl
    also = [
        *(["dynamic filtering"] if algorithm.filters_groups else []),
        *(["overlong penalty"] if algorithm.overlong_buffer else []),
    ]
    return (
        f"[{algorithm.name}]({algorithm.paper})",
        algorithm.advantage,
        algorithm.policy_loss,
        POLICY_LOSSES[algorithm.policy_loss].ratio,
        f"{low:g}" if low == high else f"{low:g} {high:g}",
        algorithm.aggregation,
        f"{kl.estimator} in the {kl.place}" if kl else "",
        algorithm.correction or "",
        ", ".join(also),
        f"`{' '.join(algorithm.flags)}`" if algorithm.flags else "(the defaults)",
    )


def main() -> None:
    print(table(), end="")


if __name__ == "__main__":
    main()
