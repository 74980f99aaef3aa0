"""Detects unhealthy runs by rules on metrics, each with a remedy. A run that no rule detects may still be
unhealthy."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Self

from openrlhf.algorithms.mismatch import MismatchWatch
from openrlhf.types import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    metric: str
    sign: Literal["<", ">", "="]
    limit: float
    steps: int
    """Number of consecutive steps for which the condition must hold. Steps without the metric do not
    count."""
    text: str
    """The meaning of the condition, and the remedy."""

    @classmethod
    def of(cls, condition: str, text: str) -> Self:
        """Parses a condition such as "policy/entropy < 0.02 for 20 steps"."""
        metric, sign, limit, _, steps, _ = condition.split()
        assert sign in ("<", ">", "=")
        return cls(metric=metric, sign=sign, limit=float(limit), steps=int(steps), text=text)

    @property
    def condition(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.metric} {self.sign} {self.limit:g} for {steps}"

    def holds(self, value: float) -> bool:
        return {"<": value < self.limit, ">": value > self.limit, "=": value == self.limit}[self.sign]


_REMEDIES = {
    "reward/zero_std_fraction > 0.9 for 20 steps": (
        "for nearly all prompts, all samples have the same reward, so nothing is learnt from them. "
        "Read samples. If the reward is right, use harder prompts in place of those that are always solved, "
        "easier ones in place of those that never are, or --algo.dynamic_filtering_enable."
    ),
    "reward/clipped_fraction > 0.1 for 1 step": (
        "rewards lie outside of the clip range, so nothing distinguishes those beyond the same bound. Scale "
        "the reward function, or set --reward.clip_range to bounds that hold all rewards."
    ),
    "advantage/abs_mean = 0 for 1 step": (
        "all advantages are 0, so nothing is learnt from the rewards of this step. If rollout/reward_std is "
        "positive, --reward.clip_range, a penalty or the group baseline has removed the differences."
    ),
    "rollout/failed_ratio > 0.1 for 3 steps": (
        "samples end without a reward and are not trained on. Their `error` is in the run folder's rollouts; "
        "a slow reward function needs a higher --reward.timeout."
    ),
    "rollout/truncated_rate > 0.5 for 10 steps": (
        "most answers run out of tokens. Raise --rollout.max_new_tokens or --data.max_len, or see in "
        "the samples whether the model ever ends its turn with a stop token."
    ),
    "rollout/duplicate_ratio > 0.9 for 10 steps": (
        "the samples of a prompt repeat each other, so there is nothing to compare. Raise "
        "--rollout.temperature or --actor.entropy_coef, or lower --actor.adam.lr."
    ),
    "rollout/repetition_ratio > 0.5 for 5 steps": (
        "answers repeat themselves. Read samples: does the reward encourage it? Raise "
        "--algo.kl.init_coef, or lower --actor.adam.lr; --reward.overlong_buffer_len penalises length."
    ),
    "rollout/length_reward_correlation > 0.9 for 20 steps": (
        "the reward grows with the length of the answer. Read samples: is length itself rewarded? "
        "--reward.overlong_buffer_len penalises length."
    ),
    "rollout/kept_set_rest_mean > 0.05 for 3 steps": (
        "the top-p/top-k support has many more tokens than are recorded. The others together have more than "
        "5 % of the probability, which gets no gradient. Raise --rollout.max_kept_tokens, or lower "
        "--rollout.top_p or --rollout.temperature."
    ),
    "mismatch/abs_diff_mean > 0.05 for 3 steps": (
        "sampler and trainer disagree about the probability of a token by more than 5 %. If both "
        "have the same weights, look for a difference in precision, kernel or chat template; MoE models "
        "need --algo.router_replay. --algo.advantage.is_correction_enable limits the damage."
    ),
    "mismatch/merged_fraction < 0.9 for 1 step": (
        "rounding to the engines' precision loses a part of what the adapters change, so samples come from a "
        "policy nearer to the base model. Use --vllm.lora_sync adapter, which sends the adapters themselves; "
        "--ds.param_dtype fp32 loses nothing."
    ),
    "mismatch/ess < 0.5 for 3 steps": (
        "sampler and trainer are so far apart that few tokens would dominate an importance-weighted "
        "update. Keep the sampler closer: fewer updates between syncs, the same precision."
    ),
    "policy/is_masked_fraction > 0.5 for 3 steps": (
        "the correction drops most tokens. Fix what makes sampler and trainer differ (see mismatch/), "
        "or widen --algo.advantage.is_correction_threshold."
    ),
    "policy/staleness_masked_fraction > 0.5 for 3 steps": (
        "most tokens are older than --algo.advantage.max_token_staleness, and nothing is learnt from "
        "them. Raise that limit, or sample less far ahead: --train.async_queue_size."
    ),
    "policy/clip_fraction > 0.5 for 5 steps": (
        "the policy moves so far within a step that most tokens are clipped. Lower --actor.adam.lr or "
        "--train.max_epochs, or raise --train.batch_size."
    ),
    "policy/entropy < 0.02 for 20 steps": (
        "the policy hardly varies its answers and explores little. Raise --actor.entropy_coef, the "
        "upper clip bound or --rollout.temperature, or lower --actor.adam.lr."
    ),
    "kl/mean > 1 for 5 steps": (
        "the policy has left the reference by more than 1 nat a token. Raise --algo.kl.init_coef or "
        "lower --actor.adam.lr, and read samples: reward may rise while answers degrade."
    ),
    "grad_norm > 100 for 5 steps": (
        "gradients are very large before clipping. Lower the learning rate, lengthen the warm-up, and look "
        "for rewards or rows out of range."
    ),
    "grad_norm = 0 for 1 step": (
        "the step had no gradient, so nothing was learnt. Look for advantages of 0, a mask or a clip range "
        "that leaves out every token, or answers without tokens to learn."
    ),
    "critic/clip_fraction > 0.5 for 5 steps": (
        "most values of the critic are stopped at their clip range and get no gradient: returns are large "
        "beside it. Raise --critic.value_clip, or scale the rewards."
    ),
    "critic/explained_variance < 0 for 20 steps": (
        "the critic predicts returns worse than a constant, their mean, would. Raise --critic.adam.lr, or "
        "train the critic alone at first (--critic.freezing_steps)."
    ),
    "eval/failed_ratio > 0.1 for 1 step": (
        "samples of the evaluation fail, so its scores may be biased. The `error` of each sample "
        "is in the run folder's rollouts."
    ),
}
"""Condition -> its meaning and the remedy."""

SHOWN_WITH = {"reward/clipped_fraction": ("reward/shaped_min", "reward/shaped_max")}
"""Metric of a rule -> metrics whose values its message also has."""

RULES = tuple(Rule.of(condition, text) for condition, text in _REMEDIES.items())


SAME_REWARD = (
    "they do not distinguish good answers from bad ones, so nothing is learnt. Check the reward function and "
    'the label first: a number never equals a text (7 == "7" is False), --data.label_key may name the wrong '
    "column, or the reward function may not find the answer in the response. Rewards, labels and responses "
    "are in the run folder's rollouts. If the reward is right, all prompts are too easy or too hard."
)
"""Likely causes of rewards that are all equal, and the remedies."""


@dataclass(kw_only=True)
class Rewards:
    """Detects that every sample since the run began or resumed has the same reward."""

    value: float = math.nan
    """The reward of all samples so far."""
    steps: int = 0
    """Number of steps that have reported rewards."""
    differ: bool = False

    def check(self, metrics: Metrics) -> list[str]:
        """Returns a message after the first step if all its rewards are equal. Steps with a single sample,
        with a teacher or without rewards do not count."""
        is_one_sample = metrics.get("rollout/num_samples") == 1
        if is_one_sample or "teacher/kl_mean" in metrics or "rollout/reward_std" not in metrics:
            return []
        mean = metrics["rollout/reward_mean"]
        changed = self.steps > 0 and not math.isclose(mean, self.value)
        self.differ = self.differ or metrics["rollout/reward_std"] > 0 or changed
        self.value, self.steps = mean, self.steps + 1
        if self.differ or self.steps > 1:
            return []
        return [f"all rewards of the step are {mean:g}: {SAME_REWARD}"]

    def at_end(self) -> list[str]:
        """Returns a message if the rewards of several steps were all equal."""
        if self.differ or self.steps < 2:
            return []
        return [f"all rewards of these {self.steps} steps are {self.value:g}: {SAME_REWARD}"]


@dataclass(kw_only=True)
class Health:
    """Checks the metrics of each step by all rules."""

    rules: tuple[Rule, ...] = RULES
    mismatch: MismatchWatch | None = None
    """Comparison of sampler and trainer; None in supervised learning."""
    streaks: Counter[Rule] = field(default_factory=Counter, init=False)
    """Number of consecutive steps for which each rule's condition has held."""
    rewards: Rewards = field(default_factory=Rewards, init=False)

    def check(self, metrics: Metrics) -> list[str]:
        """Returns messages about metrics that became unhealthy with this step. A rule fires when its
        condition has held for its number of steps, and again only after the metric was healthy. A step
        without the metric, or with NaN, neither counts nor interrupts."""
        messages = self.mismatch.check(metrics) if self.mismatch else []
        for rule in self.rules:
            value = metrics.get(rule.metric, math.nan)
            if math.isnan(value):
                continue
            self.streaks[rule] = self.streaks[rule] + 1 if rule.holds(value) else 0
            if self.streaks[rule] == rule.steps:
                names = [name for name in SHOWN_WITH.get(rule.metric, ()) if name in metrics]
                values = [f"{value:.3g}", *(f"{name} {metrics[name]:.6g}" for name in names)]
                messages.append(f"{rule.condition} (last {', '.join(values)}): {rule.text}")
        return messages + self.rewards.check(metrics)

    def at_end(self) -> list[str]:
        """Returns messages about the run as a whole."""
        return self.rewards.at_end()
