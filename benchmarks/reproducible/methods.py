"""Methods of the table, by the flags of `openrlhf ppo` that select them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from named_algorithms import ALGORITHMS  # tools/
from ppo_with_critic import WITH_CRITIC  # recipes/

OPTIMIZER_STEPS = 2
"""Optimizer steps on the samples of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    title: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    update: Literal["policy", "dpo", "best_of_n", "trl"] = "policy"
    """How the samples of a step change the policy: a function of `loops.py`, or TRL's trainer."""
    samples_ahead: bool = False
    """True: the engine samples the next batch during the update."""


def named(name: str) -> dict[str, Any]:
    """Returns the flags of a row of docs/algorithms.md."""
    (algorithm,) = (algorithm for algorithm in ALGORITHMS if algorithm.name == name)
    return {key: value for key, value in algorithm.settings.items() if value is not None}


CRITIC = {key: value for key, value in WITH_CRITIC.items() if key.startswith("critic.")}
WITHOUT_KL = {"algo.kl.init_coef": 0}
METHODS = {
    "grpo": Method(title="GRPO", flags=named("GRPO")),
    "dr_grpo": Method(title="Dr. GRPO", flags=named("Dr. GRPO")),
    "rloo": Method(title="RLOO", flags=named("RLOO")),
    "reinforce_pp": Method(title="REINFORCE++", flags=named("REINFORCE++")),
    "reinforce_pp_baseline": Method(title="REINFORCE++-baseline", flags=named("REINFORCE++-baseline")),
    "ppo": Method(title="PPO with a critic", flags=named("PPO") | CRITIC),
    "gspo": Method(title="GSPO", flags=named("GSPO")),
    "cispo": Method(title="CISPO", flags=named("CISPO")),
    "grpo_async": Method(
        title="asynchronous GRPO",
        flags=named("GRPO") | {"algo.advantage.is_correction_enable": True},
        samples_ahead=True,
    ),
    "dpo": Method(title="DPO on its own samples", flags=WITHOUT_KL, update="dpo"),
    "best_of_n": Method(title="SFT on its best of n", flags=WITHOUT_KL, update="best_of_n"),
    "trl_grpo": Method(title="GRPO of TRL", update="trl"),
}
