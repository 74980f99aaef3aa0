"""Base class of advantage estimators, and their view of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from openrlhf.algorithms.advantages.returns import discounted_returns
from openrlhf.algorithms.tensor import Tensor
from openrlhf.registry import Selectable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepView:
    """The samples of a step as an estimator sees them: E episodes, their B sequences, and the A actions of
    the sequences. All tensors are on the CPU. An episode has one sequence, or several if an agent rewrote its
    history. Failed episodes are left out, so groups differ in size."""

    rewards: Tensor
    """(E,) float32: the reward of each episode, after length penalties."""
    group_ids: Tensor
    """(E,) integers, equal for the samples of one prompt. These samples need not be adjacent."""
    named_rewards: Mapping[str, Tensor]
    """(E,) float32 each: the values that the reward source reports by name (`extra_logs`), and its `score`;
    NaN for an episode without a value of this name."""
    lengths: Tensor
    """(E,) number of actions of each episode."""
    turns: Tensor
    """(E,) number of engine requests of each episode."""
    truncated: Tensor
    """(E,) bool, True if the answer is truncated."""
    episodes: Tensor
    """(B,) index of each sequence's episode."""
    counts: Tensor
    """(B,) number of actions of each sequence; they add up to A."""
    log_probs: Tensor | None
    """(A,) log-probs of the policy before the update; None if they are not computed, see
    `AdvantageEstimator.needs_log_probs`."""
    rollout_log_probs: Tensor
    """(A,) log-probs of the sampler."""
    ref_log_probs: Tensor | None
    """(A,) log-probs of the reference model; None without one."""
    values: Tensor | None
    """(A,) values of the critic; None if the estimator needs none."""
    gamma: float
    """Discount factor, `--algo.advantage.gamma`."""
    lambd: float
    """Lambda of generalized advantage estimation, `--algo.advantage.lambd`."""


class AdvantageEstimator(Selectable):
    """Turns the rewards of a step into advantages of its actions, in two hooks.

    Between the two hooks, shaped rewards are clipped (`--reward.clip_range`) and the KL penalty is added to
    each action. There is one instance per run, which may keep state across steps.
    """

    needs_group: ClassVar[bool] = False
    """True if it compares the samples of a prompt, so that a group of equal rewards has no learning
    signal."""
    needs_critic: ClassVar[bool] = False
    """True if it reads `StepView.values` and `StepView.lambd`; a critic is then loaded and trained."""
    needs_log_probs: ClassVar[bool] = False
    """True if it reads `StepView.log_probs`, which are then computed in a separate forward pass."""
    discounts: ClassVar[bool] = False
    """True if it reads `StepView.gamma`. Other estimators give every action the whole reward of its
    episode."""
    whiten: ClassVar[bool] = False
    """True if the advantages that it returns are whitened over all actions of the step."""

    def shape(self, step: StepView) -> Tensor:
        """Returns the shaped reward of each episode, (E,); by default its reward."""
        return step.rewards

    def advantages(self, rewards: Tensor, step: StepView) -> tuple[Tensor, Tensor]:
        """Returns the advantage and the return of each action, both (A,). `rewards` (A,): the reward of each
        action. By default advantages equal returns."""
        returns = discounted_returns(rewards, step.counts, step.gamma if self.discounts else 1.0)
        return returns, returns

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs: numbers, texts, tensors, lists, dictionaries."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`. Not called for a checkpoint without a state."""
