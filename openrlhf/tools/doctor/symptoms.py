"""The symptoms of unhealthy runs, each with its remedy: rules on single metrics, and mistakes that a step's
metrics show together. A run's warnings and `openrlhf doctor` know the same ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

from openrlhf.api import TEMPLATE, USE_TEMPLATE, Metrics, counted


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
    cause: str = ""
    """Cause of the diagnosis that explains it, if any."""
    suits_success: bool = False
    """True if the condition also holds for a policy that is sure of its answers because it succeeds."""
    unless: str = ""
    """Metric that explains the condition where it is not 0."""
    shown_with: Sequence[str] = ()
    """Metrics whose values belong to a message."""

    @classmethod
    def of(cls, condition: str, text: str, **more: Any) -> Self:
        """Parses a condition such as "policy/entropy < 0.02 for 20 steps"."""
        metric, sign, limit, _, steps, _ = condition.split()
        assert sign in ("<", ">", "=")
        return cls(metric=metric, sign=sign, limit=float(limit), steps=int(steps), text=text, **more)

    @property
    def condition(self) -> str:
        steps = counted(self.steps, "step")
        return f"{self.metric} {self.sign} {self.limit:g} for {steps}"

    def holds(self, value: float) -> bool:
        return {"<": value < self.limit, ">": value > self.limit, "=": value == self.limit}[self.sign]


RULES = (
    Rule.of(
        "reward/zero_std_fraction > 0.9 for 20 steps",
        "for nearly all prompts, all samples have the same reward, so nothing is learnt from them. "
        "Read samples. If the reward is right, use harder prompts in place of those that are always solved, "
        "easier ones in place of those that never are, or --algo.dynamic_filtering_enable.",
        cause="flat-reward",
        suits_success=True,
        unless="teacher/kl_mean",
    ),
    Rule.of(
        "reward/clipped_fraction > 0.1 for 1 step",
        "rewards lie outside of the clip range, so nothing distinguishes those beyond the same bound. Scale "
        "the reward function, or set --reward.clip_range to bounds that hold all rewards.",
        shown_with=("reward/shaped_min", "reward/shaped_max"),
    ),
    Rule.of(
        "advantage/abs_mean = 0 for 1 step",
        "all advantages are 0, so nothing is learnt from the rewards of this step. If rollout/reward_std is "
        "positive, --reward.clip_range, a penalty or the group baseline has removed the differences.",
        cause="flat-reward",
        suits_success=True,
    ),
    Rule.of(
        "rollout/failed_ratio > 0.1 for 3 steps",
        "samples end without a reward and are not trained on. Their `error` is in the run folder's rollouts; "
        "a slow reward function needs a higher --reward.timeout.",
        cause="failed-samples",
    ),
    Rule.of(
        "rollout/truncated_rate > 0.5 for 10 steps",
        "most answers run out of tokens. Raise --rollout.max_new_tokens or --data.max_len, or see in "
        "the samples whether the model ever ends its turn with a stop token.",
        cause="truncation",
    ),
    Rule.of(
        "rollout/duplicate_ratio > 0.9 for 10 steps",
        "the samples of a prompt repeat each other, so there is nothing to compare. Raise "
        "--rollout.temperature or --actor.entropy_coef, or lower --actor.adam.lr.",
        cause="entropy-collapse",
        suits_success=True,
    ),
    Rule.of(
        "rollout/repetition_ratio > 0.5 for 5 steps",
        "answers repeat themselves. Read samples: does the reward encourage it? Raise "
        "--algo.kl.init_coef, or lower --actor.adam.lr; --reward.overlong_buffer_len penalises length.",
    ),
    Rule.of(
        "rollout/length_reward_correlation > 0.9 for 20 steps",
        "the reward grows with the length of the answer. Read samples: is length itself rewarded? "
        "--reward.overlong_buffer_len penalises length.",
    ),
    Rule.of(
        "rollout/kept_set_rest_mean > 0.05 for 3 steps",
        "the top-p/top-k nucleus has many more tokens than are recorded. The others together have more than "
        "5 % of the probability, which gets no gradient. Raise --rollout.max_kept_tokens, or lower "
        "--rollout.top_p or --rollout.temperature.",
    ),
    Rule.of(
        "mismatch/abs_diff_mean > 0.05 for 3 steps",
        "sampler and trainer disagree about the probability of a token by more than 5 %. If both "
        "have the same weights, look for a difference in precision, kernel or chat template; MoE models "
        "need --algo.router_replay. --algo.advantage.is_correction_enable limits the damage.",
        cause="gap",
        unless="rollout/staleness_max",
    ),
    Rule.of(
        "mismatch/merged_fraction < 0.9 for 1 step",
        "rounding to the engines' precision loses a part of what the adapters change, so samples come from a "
        "policy nearer to the base model. Use --vllm.lora_sync adapter, which sends the adapters themselves; "
        "--ds.param_dtype fp32 loses nothing.",
    ),
    Rule.of(
        "mismatch/ess < 0.5 for 3 steps",
        "sampler and trainer are so far apart that few tokens would dominate an importance-weighted "
        "update. Keep the sampler closer: fewer updates between syncs, the same precision.",
        cause="gap",
    ),
    Rule.of(
        "policy/is_masked_fraction > 0.5 for 3 steps",
        "the correction drops most tokens. Fix what makes sampler and trainer differ (see mismatch/), "
        "or widen --algo.advantage.is_correction_threshold.",
    ),
    Rule.of(
        "policy/staleness_masked_fraction > 0.5 for 3 steps",
        "most tokens are older than --algo.advantage.max_token_staleness, and nothing is learnt from "
        "them. Raise that limit, or sample less far ahead: --train.async_queue_size.",
    ),
    Rule.of(
        "policy/clip_fraction > 0.5 for 5 steps",
        "the policy moves so far within a step that most tokens are clipped. Lower --actor.adam.lr or "
        "--train.max_epochs, or raise --train.batch_size.",
    ),
    Rule.of(
        "policy/entropy < 0.02 for 20 steps",
        "the policy hardly varies its answers and explores little. Raise --actor.entropy_coef, the "
        "upper clip bound or --rollout.temperature, or lower --actor.adam.lr.",
        cause="entropy-collapse",
        suits_success=True,
    ),
    Rule.of(
        "kl/mean > 1 for 5 steps",
        "the policy has left the reference by more than 1 nat a token. Raise --algo.kl.init_coef or "
        "lower --actor.adam.lr, and read samples: reward may rise while answers degrade.",
    ),
    Rule.of(
        "grad_norm > 100 for 5 steps",
        "gradients are very large before clipping. Lower the learning rate, lengthen the warm-up, and look "
        "for rewards or rows out of range.",
    ),
    Rule.of(
        "grad_norm = 0 for 1 step",
        "the step had no gradient, so nothing was learnt. Look for advantages of 0, a mask or a clip range "
        "that leaves out every token, or answers without tokens to learn.",
        cause="flat-reward",
        suits_success=True,
    ),
    Rule.of(
        "skipped > 0.5 for 3 steps",
        "most optimizer steps are skipped because a loss or gradient is not finite, so nothing is learnt "
        "from them. Lower the learning rate, and look for rewards or rows out of range; "
        "--train.on_nonfinite stop ends the run at the first one.",
    ),
    Rule.of(
        "critic/clip_fraction > 0.5 for 5 steps",
        "most values of the critic are stopped at their clip range and get no gradient: returns are large "
        "beside it. Raise --critic.value_clip, or scale the rewards.",
    ),
    Rule.of(
        "critic/explained_variance < 0 for 20 steps",
        "the critic predicts returns worse than a constant, their mean, would. Raise --critic.adam.lr, or "
        "train the critic alone at first (--critic.freezing_steps).",
    ),
    Rule.of(
        "eval/failed_ratio > 0.1 for 1 step",
        "samples of the evaluation fail, so its scores may be biased. The `error` of each sample "
        "is in the run folder's rollouts.",
        cause="failed-samples",
    ),
)


def find_limit(metric: str) -> float:
    return next(rule.limit for rule in RULES if rule.metric == metric)


def succeeds(rows: Sequence[Metrics]) -> bool:
    """Returns True if a score has risen and keeps three quarters of its gain, or stands within a tenth of the
    highest reward of a sample. Scores are those of several evaluations, else the steps' mean rewards."""
    highest = max((row.get("rollout/reward_max", -math.inf) for row in rows), default=-math.inf)
    names = {n for row in rows for n in row if n.startswith("eval/") and n.endswith("_score_mean")}
    held_out = [values for name in names if len(values := [row[name] for row in rows if name in row]) > 1]
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    for values in held_out or [rewards] * (len(rewards) > 1):
        size = len(values) // 4 or 1
        means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
        start, best, end = means[0], max(means), fmean(values[-min(size, 5) :])
        rises = best - start > max(0.02, 0.1 * abs(start)) and end - start >= 0.75 * (best - start)
        if rises or end >= 0.9 * highest > 0:
            return True
    return False


class Sign(NamedTuple):
    """A mistake that a step shows and that explains what looks unhealthy, with the fields of a finding."""

    cause: str
    title: str
    evidence: str
    remedy: str


LONGER = (
    "raise --rollout.max_new_tokens or --data.max_len, and see with `openrlhf check` which tokens end an "
    "answer; only then suspect reward and label"
)
CUT = 0.9
"""Fraction of truncated answers above which nearly all are cut."""


def find_mistakes(rows: Sequence[Metrics], missing_template: str = "") -> Iterator[Sign]:
    """Yields mistakes that the last row shows. `missing_template`: evidence that prompts lack a template."""
    now, sampled = rows[-1], [row for row in rows[-5:] if "rollout/reward_mean" in row]
    if now not in sampled:
        yield from _lost_model(rows)
        return
    if missing_template:
        yield Sign("missing-template", TEMPLATE, missing_template, USE_TEMPLATE)
    yield from _lost_policy(sampled)
    if (rate := now.get("rollout/truncated_rate", 0.0)) > CUT:
        length = now.get("rollout/response_length_mean", math.nan)
        evidence = f"{rate:.0%} are cut, after {length:.3g} tokens on average, so the reward misses their end"
        yield Sign("truncation", "truncation: answers run out of tokens", evidence, LONGER)


def _lost_policy(rows: Sequence[Metrics]) -> Iterator[Sign]:
    """Yields a sign if the reward has fallen from the best of the last steps by half its standard deviation,
    and by more than chance, to one value for all samples; or has not risen, and answers no longer end."""
    best, now = max(rows[:-1] or rows, key=lambda row: row["rollout/reward_mean"]), rows[-1]
    reward, cut, std = (
        [row.get(f"rollout/{name}", math.nan) for row in (best, now)]
        for name in ("reward_mean", "truncated_rate", "reward_std")
    )
    fall, size = reward[0] - reward[1], now.get("rollout/num_samples", 0)
    are_equal = size >= 16 and std[1] == 0 and fall > std[0] * max(0.5, 4 / math.sqrt(size))
    if are_equal or (fall >= 0 and cut[1] - cut[0] > 0.5):
        evidence = f"reward {reward[0]:.3g} -> {reward[1]:.3g}, cut answers {cut[0]:.0%} -> {cut[1]:.0%}"
        yield _lost("policy", evidence, "--actor.adam.lr", rows[-2])


def _lost_model(rows: Sequence[Metrics]) -> Iterator[Sign]:
    for name, loss in rows[-1].items():
        first = [row[name] for row in rows[:-1][:8] if name in row]
        is_loss = name.endswith("/loss") and not name.startswith("eval/")
        if is_loss and first and loss > 1.5 * max(first) + 2:
            yield _lost("model", f"{name} {first[0]:.3g} -> {loss:.3g}", "--adam.lr", rows[-2])


def _lost(model: str, evidence: str, flag: str, update: Metrics) -> Sign:
    title, rate = f"an update has destroyed the {model}", update.get("lr", math.nan)
    remedy = f"lower {flag} first, tenfold or more (it was {rate:.2g}), and start again from before it"
    return Sign("destroyed-model", title, evidence, remedy)
