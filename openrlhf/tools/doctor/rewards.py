"""Finds problems with rewards: equal rewards, failed samples, and rewards that rise while a held-out score
falls."""

from collections.abc import Iterator

import numpy as np

from openrlhf.api import commonest_failure, headline, read_journal, read_table
from openrlhf.tools.doctor.record import FEWEST, Finding, RunRecord, Series
from openrlhf.tools.doctor.samples import Answers, read_answers
from openrlhf.tools.doctor.symptoms import find_limit, succeeds

RECENT = 20
"""Number of last steps that represent the present state of a run."""
FLAT = find_limit("reward/zero_std_fraction")
"""Fraction of samples in groups with equal rewards above which there is hardly anything to learn."""
FAILED = find_limit("rollout/failed_ratio")
"""Fraction of failed samples above which there is a finding."""
CLEAR = 3.0
"""Standard errors above which a change counts as a trend."""
LOST = 0.5
"""Fraction of its best score that a degraded policy has lost."""
BLOCKS = 12
"""Number of means to which a longer course is reduced."""
LABELLED = 0.2
"""Fraction of the answers with the lowest reward that may contain the label. If more do, the reward function
is suspect."""


def reward_findings(run: RunRecord) -> Iterator[Finding]:
    yield from _flat(run)
    yield from _raised(run)
    yield from _failed(run)
    yield from _hacked(run)
    yield from _degraded(run)


def _flat(run: RunRecord) -> Iterator[Finding]:
    mean, std = run.series("rollout/reward_mean"), run.series("rollout/reward_std")
    share = run.series("reward/zero_std_fraction")
    truncated = run.series("rollout/truncated_rate").last(RECENT)
    if not len(mean) or run.names("teacher/") or truncated > 0.5:  # cut answers explain equal rewards
        return
    same = len(std) > 0 and not std.values.any() and bool((mean.values == mean.values[0]).all())
    flat = share.last(RECENT) if len(share) else float(same)
    if not same and (not flat > FLAT or (share.start < FLAT and succeeds(run.numbers))):
        return
    last = read_answers(max(run.journal.items())[1]) if run.journal else None
    if same:
        evidence = [
            f"the reward is {mean.values[0]:g} for every sample of steps {mean.steps[0]} to {mean.steps[-1]}"
        ]
    else:
        evidence = [
            f"in the last {min(RECENT, len(share))} steps, {flat:.0%} of the samples are in groups whose "
            f"rewards are all equal ({share.describe()})",
            mean.describe(),
        ]
    yield Finding(
        cause="flat-reward",
        title=f"flat reward: {'all samples have the same reward' if same else 'groups have equal rewards'}",
        score=0.97 if same else min(0.9, flat) if share.start > FLAT else 0.65,
        evidence=(*evidence, *_reward_evidence(last)),
        remedy=_flat_remedy(last, mean, run.series("rollout/reward_max")),
    )


def _reward_evidence(last: Answers | None) -> Iterator[str]:
    if last is None:
        return
    values = sorted(set(last.rewards))
    shown = ", ".join(f"{value:g}" for value in values[:5])
    yield f"rewards of the last step: {shown}{', ...' if len(values) > 5 else ''} ({last.count} samples)"
    if last.contains_label > LABELLED:
        yield f"{last.contains_label:.0%} of the answers with the lowest reward contain the label as text"


def _flat_remedy(last: Answers | None, mean: Series, highest: Series) -> str:
    if last is not None and last.contains_label > LABELLED:
        return (
            "test the reward function of --reward.remote_url with these answers, which contain the label but "
            'get the lowest reward. A number never equals a text (7 == "7" is False).'
        )
    lowest = min(0.0, *mean.values, *(last.rewards if last else ()))
    if len(highest) and mean.end > (lowest + float(highest.values.max())) / 2:
        return "use harder prompts, or --algo.dynamic_filtering_enable: nearly all prompts are solved"
    return (
        "check --data.label_key and the reward function with `openrlhf check`; if they are right, use easier "
        "prompts, a higher --rollout.n_samples_per_prompt or --algo.dynamic_filtering_enable"
    )


def _raised(run: RunRecord) -> Iterator[Finding]:
    """Yields a finding if a penalty that is a factor raises negative rewards of the last step."""
    step, path = max(run.journal.items(), default=(0, None))
    rows = read_table(path, ["reward", "truncated", "source"]).to_pylist() if path else []
    raised = []
    for row in rows:
        name = "stop_properly_penalty_coef"
        coef = run.flag(f"tasks.{row['source']}.{name}", run.flag(f"reward.{name}", -1.0))
        if row["truncated"] and (row["reward"] or 0.0) < 0 and 0 <= coef < 1:
            raised.append((row["reward"], row["reward"] * coef))
    if raised:
        before, after = min(raised)
        yield Finding(
            cause="raised-rewards",
            title="--reward.stop_properly_penalty_coef raises rewards of truncated answers",
            score=0.9,
            evidence=(
                f"step {step}: {len(raised)} of {len(rows)} samples are truncated and have negative rewards; "
                f"{before:g} becomes {after:g}",
            ),
            remedy="set it to a negative number, which replaces their rewards, or give no negative rewards",
        )


def _failed(run: RunRecord) -> Iterator[Finding]:
    for name, files in (("rollout/failed_ratio", run.journal), ("eval/failed_ratio", {})):
        ratio = run.series(name)
        recent = ratio.last(3)
        if not recent > FAILED:
            continue
        evidence = [f"{name} is {recent:.0%} in the last {min(3, len(ratio))} steps that report it"]
        for step, path in reversed(files.items()):
            if failed := [trajectory for trajectory in read_journal(path) if not trajectory.ok]:
                example, count = commonest_failure(failed)
                evidence.append(
                    f"step {step}: {count} of {len(failed)} failures are {example.outcome.value}: "
                    f"{headline(example)[:240]}"
                )
                break
        yield Finding(
            cause="failed-samples",
            title=f"samples of {'the evaluation' if name.startswith('eval') else 'training'} fail",
            score=0.95,
            evidence=tuple(evidence),
            remedy="fix the error, which `openrlhf rollouts RUN --failed` lists; for a slow reward function "
            "raise --reward.timeout, for a slow environment --rollout.episode_timeout",
        )


def _hacked(run: RunRecord) -> Iterator[Finding]:
    """Yields a finding if the reward rises while a held-out score falls."""
    reward = run.series("rollout/reward_mean")
    if not reward.trend > CLEAR:
        return
    scores = [run.series(name) for name in run.names("eval/") if name.endswith("_score_mean")]
    falling = [score for score in scores if _falls(score)]
    signs = list(_signs(run))
    if not falling and (scores or {kind for kind, _, _ in signs} <= {"duplicates"}):  # success has them too
        return
    evidence = [reward.describe()]
    evidence += map(_fall, falling)
    if not scores:
        evidence.append("the run has no evaluation that shows whether the answers became better")
    kinds = " and ".join(kind for kind, _, _ in signs[:2]) or "the answers give no hint at the reason"
    remedies = [remedy for _, _, remedy in signs[:2]] or [
        "read samples: `openrlhf rollouts RUN --sort reward`"
    ]
    kl = "raise --algo.kl.init_coef, and keep the best checkpoint (--ckpt.best_metric_key)"
    yield Finding(
        cause="reward-hacking",
        title=f"reward rises while the held-out score falls: {kinds}"
        if falling
        else f"reward may be hacked: {kinds}",
        score=(0.9 if signs else 0.75) if falling else 0.4,
        evidence=(*evidence, *(text for _, text, _ in signs)),
        remedy="; ".join([*remedies, kl]),
    )


def _degraded(run: RunRecord) -> Iterator[Finding]:
    """Yields a finding if the scores of evaluations, or without any the reward, have lost LOST of their best,
    and the reward does not rise. Three of a hundred courses without a trend lose as much by chance."""
    reward = run.series("rollout/reward_mean")
    scores = [
        score for n in run.names("eval/") if n.endswith("_score_mean") and len(score := run.series(n)) > 4
    ]
    falling = [series for series in scores or [reward] if _falls(series, LOST, 2 * CLEAR)]
    if len(reward) < FEWEST or not falling or reward.trend > CLEAR or succeeds(run.numbers):
        return
    names = ("rollout/reward_mean", "kl/mean", "policy/entropy", "policy/clip_fraction", "grad_norm")
    courses = [series for name in names if len(series := run.series(name))]
    yield Finding(
        cause="degraded-policy",
        title="the policy has become worse than it was",
        score=0.78 if scores else 0.5,
        evidence=(*map(_fall, falling), *(series.describe() for series in courses)),
        remedy="lower --actor.adam.lr or raise --algo.kl.init_coef, and go on from the best checkpoint "
        "(--ckpt.best_metric_key keeps it, --ckpt.fork_from continues it)"
        + ("" if scores else "; without --eval.dataset it may be that later prompts are harder"),
    )


def _fall(score: Series) -> str:
    best = int(score.values.argmax())
    return (
        f"{score.name} falls from {score.values[best]:.3g} (step {score.steps[best]}) to "
        f"{score.values[-1]:.3g} (step {score.steps[-1]})"
    )


def _falls(score: Series, share: float = 0.1, clear: float = CLEAR) -> bool:
    """Returns True if the last values are below the best by this share of it, and by `clear` times what
    values differ by from one to the next."""
    if len(score) < 3:
        return False
    values = np.array([part.mean() for part in np.array_split(score.values, min(len(score), BLOCKS))])
    steps = np.diff(values)
    noise = float(np.median(abs(steps - np.median(steps))))
    fall = float(values[:-1].max() - values[-max(1, len(values) // 4) :].mean())
    return fall > max(0.02, share * abs(values[:-1].max()), clear * noise)


def _signs(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, evidence, remedy) for each change of the answers that the reward may favour."""
    length, correlation = (
        run.series(f"rollout/{name}") for name in ("response_length_mean", "length_reward_correlation")
    )
    if length.trend > CLEAR and length.end > 1.5 * length.start and correlation.last(RECENT) > 0.3:
        yield (
            "length",
            f"{length.describe()}; correlation of length and reward {correlation.last(RECENT):.2f}",
            "do not reward length: --reward.overlong_buffer_len penalises it",
        )
    for name, kind in (("duplicate_ratio", "duplicates"), ("repetition_ratio", "repetition")):
        series = run.series(f"rollout/{name}")
        if series.trend > CLEAR and series.end - series.start > 0.2:
            yield kind, series.describe(), "raise --rollout.temperature or --actor.entropy_coef"
    if len(run.journal) < FEWEST:
        return
    steps = sorted(run.journal)
    first, last = read_answers(run.journal[steps[0]]), read_answers(run.journal[steps[-1]])
    if first is None or last is None:
        return
    for kind, before, after, text in (
        ("n-gram share", first.ngram_share, last.ngram_share, "the most common 8-gram is in"),
        (
            "format",
            first.format_share,
            last.format_share,
            "the most common beginning and end of an answer is that of",
        ),
        ("duplicates", first.duplicates, last.duplicates, "the answer of another sample is repeated by"),
    ):
        if after - before > 0.3:
            yield (
                kind,
                f"{text} {before:.0%} of the samples of step {steps[0]} and {after:.0%} of step {steps[-1]}",
                "read these answers: the reward function favours what they have in common",
            )
