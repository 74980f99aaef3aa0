"""Finds problems of the policy, such as entropy collapse, a rising loss, and the run's own warnings."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from openrlhf.api import TEMPLATE, evenly
from openrlhf.tools.doctor.record import Finding, RunRecord, Series
from openrlhf.tools.doctor.rewards import RECENT
from openrlhf.tools.doctor.samples import read_answers
from openrlhf.tools.doctor.symptoms import CUT, LONGER, RULES, Rule, find_limit, find_mistakes, succeeds

COLLAPSED = find_limit("policy/entropy")
"""Entropy, in nats per token, below which it has collapsed: the policy hardly varies its answers."""
LOST = 0.2
"""Fraction of the initial entropy below which it has collapsed."""
TRUNCATED = 0.3
"""Fraction of truncated answers above which there is a finding."""


def policy_findings(run: RunRecord) -> Iterator[Finding]:
    yield from _signs(run)
    yield from _entropy(run)
    yield from _truncation(run)
    yield from _loss(run)


def _signs(run: RunRecord) -> Iterator[Finding]:
    """Yields the mistakes that single steps show but for truncation, whose whole course is a finding."""
    found, told = {}, next((w for w in run.warnings if str(w.get("text")).startswith(TEMPLATE)), None)
    evidence = "" if told is None else str(told["text"]).partition(": ")[2].partition(". Remedy")[0]
    rows = run.numbers
    for i, row in enumerate(rows):
        read = rows[: min(8, i + 1)] + rows[max(8, i - 5) : i + 1]
        for sign in find_mistakes(read, evidence):
            found.setdefault(sign.cause, (row["step"], sign))
    supervised = () if run.names("rollout/") else run.names("")
    losses = [run.series(name) for name in supervised if name.endswith("/loss")]
    recovered = succeeds(run.numbers) or any(s.end < first for s in losses for first in s.values[:1])
    for step, (cause, title, evidence, remedy) in found.values():
        if cause == "missing-template" or (cause == "destroyed-model" and not recovered):
            shown = (f"step {step:.0f}: {evidence}",)
            yield Finding(cause=cause, title=title, score=0.99, evidence=shown, remedy=remedy)


def _entropy(run: RunRecord) -> Iterator[Finding]:
    entropy = run.series("policy/entropy")
    source = entropy.name
    if len(entropy) < 2:
        steps = evenly(sorted(run.journal), 9)
        found = {step: answers.surprise for step in steps if (answers := read_answers(run.journal[step]))}
        entropy = Series("rollouts", np.array(list(found)), np.array(list(found.values())))
        source = "mean -log p of the sampled tokens (an estimate of the entropy)"
    if len(entropy) < 2:
        return
    start, end = float(entropy.values[0]), entropy.last(max(1, len(entropy) // 10))
    if not (end < COLLAPSED or end < LOST * start) or start < COLLAPSED or succeeds(run.numbers):
        return  # the entropy of a policy that succeeds falls too
    first = next(i for i, value in enumerate(entropy.values) if value < max(COLLAPSED, LOST * start))
    duplicates = run.series("rollout/duplicate_ratio")
    evidence = [
        f"{source}: {start:.3g} nats at step {entropy.steps[0]}, {end:.3g} at step {entropy.steps[-1]}; "
        f"below {max(COLLAPSED, LOST * start):.2g} since step {entropy.steps[first]}"
    ]
    if len(duplicates):
        evidence.append(f"rollout/duplicate_ratio is {duplicates.last(RECENT):.0%}")
    yield Finding(
        cause="entropy-collapse",
        title="entropy collapse: the policy hardly varies its answers",
        score=0.9 if end < COLLAPSED else 0.7,
        evidence=tuple(evidence),
        remedy="raise --actor.entropy_coef, the upper bound of --actor.eps_clip_low_high or "
        "--rollout.temperature, or lower --actor.adam.lr; resume from a checkpoint before the collapse",
    )


def _truncation(run: RunRecord) -> Iterator[Finding]:
    rate = run.series("rollout/truncated_rate")
    recent = rate.last(RECENT)
    if not recent > TRUNCATED:
        return
    length, repetition = run.series("rollout/response_length_mean"), run.series("rollout/repetition_ratio")
    limit = run.flag("rollout.max_new_tokens") or run.flag("data.max_len")
    evidence = [
        f"{recent:.0%} of the answers of the last {min(RECENT, len(rate))} steps reach their token limit "
        f"({rate.describe()})",
        f"{length.describe()}; limit {limit} tokens" if len(length) else f"limit {limit} tokens",
    ]
    if repetition.last(RECENT) > 0.5:
        evidence.append(f"answers repeat themselves: rollout/repetition_ratio {repetition.last(RECENT):.2f}")
        remedy = "answers do not end because they loop: raise --algo.kl.init_coef or lower --actor.adam.lr"
    elif recent > 0.95 and rate.start > 0.95:
        evidence.append("truncation begins with the first step: the model may never write its stop token")
        remedy = LONGER
    else:
        remedy = "raise --rollout.max_new_tokens or --data.max_len, or set --reward.overlong_buffer_len"
    yield Finding(
        cause="truncation",
        title="truncation: answers run out of tokens",
        score=0.98 if recent > CUT else 0.5 + recent / (2 if rate.start > TRUNCATED else 4),
        evidence=tuple(evidence),
        remedy=remedy,
    )


def _loss(run: RunRecord) -> Iterator[Finding]:
    if run.names("rollout/"):
        return
    for series in (run.series(name) for name in run.names("") if name.endswith("/loss")):
        if series.trend < 3 or series.end < 1.1 * series.start:
            continue
        held_out = series.name.startswith("eval")
        yield Finding(
            cause="loss-rises",
            title=f"{series.name} rises{' on held-out data: the model overfits' if held_out else ''}",
            score=0.7,
            evidence=(series.describe(),),
            remedy="lower --train.max_epochs, or train on more data"
            if held_out
            else "lower --adam.lr, raise --lr_warmup_ratio, and look for wrong rows: `openrlhf data preview`",
        )


def warning_findings(run: RunRecord, causes: AbstractSet[str]) -> Iterator[Finding]:
    has_success = succeeds(run.numbers)
    for rule in RULES:
        fired = [row["step"] for row in run.warnings if str(row.get("text")).startswith(rule.condition)]
        if fired and rule.cause not in causes and not (rule.suits_success and has_success):
            yield _apply_rule(run, rule, fired)


def _apply_rule(run: RunRecord, rule: Rule, fired: list[int]) -> Finding:
    series = run.series(rule.metric)
    still = len(series) > 0 and rule.holds(float(series.values[-1]))
    evidence = [f"warned at step {', '.join(map(str, fired[:5]))}: {rule.condition}"]
    if len(series):
        evidence.append(f"{series.describe()}; last value {series.values[-1]:.3g}")
    also = [run.series(name) for name in rule.shown_with]
    evidence += [values.describe() for values in also if len(values)]
    meaning, _, remedy = rule.text.partition(". ")
    return Finding(
        cause="unhealthy",
        title=f"{rule.metric} {'is' if still else 'was'} unhealthy: {meaning}",
        score=0.7 if still else 0.35,
        evidence=tuple(evidence),
        remedy=remedy or rule.text,
    )
