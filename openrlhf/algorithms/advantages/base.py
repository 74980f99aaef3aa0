"""What an advantage estimator is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from openrlhf.algorithms.advantages.returns import discounted_returns
from openrlhf.registry import Selectable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepView:
    """The samples of a step as an estimator sees them: E episodes, their B sequences, and the A actions of
    those. All tensors are on the CPU. An episode has one sequence, or several where an agent rewrote its
    history. Failed episodes are not among them, so groups differ in size."""

    rewards: Tensor
    """(E,) float32: the reward of each episode, after length penalties."""
    group_ids: Tensor
    """(E,) integers: equal for the samples of one prompt, which need not be neighbours."""
    named_rewards: Mapping[str, Tensor]
    """(E,) float32 each: what the source of rewards reports by name (`extra_logs`), and its `score`; NaN for
    an episode that has none of this name."""
    lengths: Tensor
    """(E,) actions of each episode."""
    turns: Tensor
    """(E,) requests to the engine that each episode made."""
    truncated: Tensor
    """(E,) bool: the last turn ran out of tokens."""
    episodes: Tensor
    """(B,) the episode of each sequence."""
    counts: Tensor
    """(B,) actions of each sequence, which add up to A."""
    log_probs: Tensor | None
    """(A,) of the policy before the update; None where nothing needs them before it, see
    `AdvantageEstimator.needs_log_probs`."""
    rollout_log_probs: Tensor
    """(A,) of the sampler."""
    ref_log_probs: Tensor | None
    """(A,) of the reference model; None without one."""
    values: Tensor | None
    """(A,) of the critic; None where the estimator needs none."""
    gamma: float
    """`--algo.advantage.gamma`"""
    lambd: float
    """`--algo.advantage.lambd`"""


class AdvantageEstimator(Selectable):
    """Turns the rewards of a step into advantages of its actions, in two hooks.

    Between the two, shaped rewards are clipped (`--reward.clip_range`) and the KL penalty is added to each
    action. An estimator lives as long as a run; what it remembers of earlier steps is its state.
    """

    needs_group: ClassVar[bool] = False
    """It compares the samples of one prompt: what all of them earn alike teaches nothing."""
    needs_critic: ClassVar[bool] = False
    """It reads `StepView.values` and `StepView.lambd`: a critic is loaded and trained."""
    needs_log_probs: ClassVar[bool] = False
    """It reads `StepView.log_probs`: they are computed in a pass of their own."""
    discounts: ClassVar[bool] = False
    """It reads `StepView.gamma`. The others credit every action with the whole outcome."""
    whiten: ClassVar[bool] = False
    """Advantages are whitened over all actions of the step afterwards."""

    def shape(self, step: StepView) -> Tensor:
        """Returns (E,) what each episode earns; by default its reward."""
        return step.rewards

    def advantages(self, rewards: Tensor, step: StepView) -> tuple[Tensor, Tensor]:
        """Returns advantages and returns, both (A,), from `rewards` (A,) of single actions; by default the
        return is both."""
        returns = discounted_returns(rewards, step.counts, step.gamma if self.discounts else 1.0)
        return returns, returns

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs of earlier steps: numbers, texts, tensors, lists, dictionaries."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. A checkpoint without a state does not call it."""
