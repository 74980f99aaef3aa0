"""Warns about a run while it runs: each symptom once, on the screen and in `health.jsonl`."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from openrlhf.api import SAME_REWARD, Hook, Metrics, Observer, to_json
from openrlhf.tools.doctor.symptoms import RULES, Rule, find_mistakes, succeeds
from openrlhf.tools.selftest.mismatch import MismatchWatch

_KEPT = re.compile(
    r"^rollout/(reward_(mean|std|max)|truncated_rate|response_length_mean|num_samples)$|^teacher/kl_mean$|^lr$"
    r"|/loss$|^eval/.*_score_mean$"
)
"""Metrics of earlier steps that `Health` needs."""


class Warnings(Hook):
    """Tells what `Health` finds."""

    observer: Observer

    def __post_init__(self) -> None:
        run = self.observer
        mismatch = MismatchWatch(dtype=run.dtype) if run.dtype else None
        self.health = Health(mismatch=mismatch, missing_template=run.missing_template)

    def logged(self, step: int, metrics: Metrics) -> None:
        self._warn(step, self.health.check(metrics))

    def closing(self) -> None:
        self._warn(self.observer.step, self.health.at_end())

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            self.observer.message(f"unhealthy: {text}")
            with open(self.observer.folder.health_path, "a", encoding="utf-8") as file:
                file.write(to_json({"step": step, "text": text}) + "\n")


@dataclass(kw_only=True)
class Health:
    """Checks the metrics of each step by all rules."""

    rules: tuple[Rule, ...] = RULES
    mismatch: MismatchWatch | None = None
    """Comparison of sampler and trainer; None in supervised learning."""
    streaks: Counter[Rule] = field(default_factory=Counter, init=False)
    """Number of consecutive steps for which each rule's condition has held."""
    missing_template: str = ""
    """See `find_mistakes`."""
    rows: list[Metrics] = field(default_factory=list, init=False)
    told: set[str] = field(default_factory=set, init=False)
    """Causes of the signs so far, each of which is told once."""

    def check(self, metrics: Metrics) -> list[str]:
        """Returns messages about metrics that became unhealthy with this step. A rule fires when its
        condition has held for its number of steps, and again only after the metric was healthy. A step
        without the metric, or with NaN, neither counts nor interrupts. The first new sign explains others."""
        self.rows.append({name: value for name, value in metrics.items() if _KEPT.search(name)})
        if "rollout/reward_mean" not in metrics and any(name.endswith("/loss") for name in metrics):
            del self.rows[8:-2]  # supervised runs have many steps, of which the first and the last count
        signs = [*find_mistakes(self.rows, self.missing_template)]
        signs = [sign for sign in signs if not {sign.cause, "destroyed-model"} & self.told][:1]
        self.told |= {sign.cause for sign in signs}
        messages = [f"{title}: {evidence}. Remedy: {remedy}" for _, title, evidence, remedy in signs]
        messages += self.mismatch.check(metrics) if self.mismatch else []
        for rule in self.rules:
            value = metrics.get(rule.metric, math.nan)
            if math.isnan(value) or metrics.get(rule.unless):
                continue
            is_wrong = rule.holds(value) and not (rule.suits_success and succeeds(self.rows))
            self.streaks[rule] = self.streaks[rule] + 1 if is_wrong else 0
            if self.streaks[rule] == rule.steps:
                names = [name for name in rule.shown_with if name in metrics]
                values = [f"{value:.3g}", *(f"{name} {metrics[name]:.6g}" for name in names)]
                messages.append(f"{rule.condition} (last {', '.join(values)}): {rule.text}")
        same = self._equal_rewards()
        if len(same) == 1 and same[0] is self.rows[-1]:
            messages.append(f"all rewards of the step are {metrics['rollout/reward_mean']:g}: {SAME_REWARD}")
        return messages

    def at_end(self) -> list[str]:
        same = self._equal_rewards()
        value = same[0]["rollout/reward_mean"] if len(same) > 1 else math.nan
        return [f"all rewards of these {len(same)} steps are {value:g}: {SAME_REWARD}"] * (len(same) > 1)

    def _equal_rewards(self) -> list[Metrics]:
        """Returns rows with rewards of several samples, if all are equal and no sign explains it."""
        rows = [row for row in self.rows if "rollout/reward_std" in row and "teacher/kl_mean" not in row]
        rows = [row for row in rows if row.get("rollout/num_samples") != 1]
        equal = all(math.isclose(r["rollout/reward_mean"], rows[0]["rollout/reward_mean"]) for r in rows)
        differ = not equal or any(row["rollout/reward_std"] for row in rows)
        return [] if differ or self.told & {"truncation", "destroyed-model"} else rows
