"""Finds the causes of slow steps: a phase that takes longer than usual or becomes slower, and ranks with more
work than others."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from openrlhf.api import read_table
from openrlhf.tools.doctor.record import FEWEST, Finding, RunRecord, Series

SLOW = 2.0
"""Multiple of the median time above which a step is slow, and of its initial time above which a phase became
slow."""
LOST_SECONDS, LOST_SHARE = 60.0, 0.1
"""Seconds, and their fraction of the run, that must be lost for a finding."""
UNEVEN = 1.5
"""Ratio of the largest to the mean number of tokens of a rank above which the work is uneven."""

REMEDIES = {
    "generate": "look at rollout/response_length_max, because one long answer delays a step. "
    "--train.async_enable samples while the models train, --rollout.max_new_tokens limits answers, and "
    "--vllm.num_engines adds engines",
    "logprobs": "raise --rollout.micro_batch_size, or --train.dynamic_batch_enable with "
    "--rollout.max_tokens_per_gpu",
    "update": "raise --train.micro_batch_size, or --train.dynamic_batch_enable with "
    "--train.max_tokens_per_gpu",
    "sync": "raise --vllm.sync_bucket_mb, and look at the network (docs/clusters.md)",
    "evaluate": "raise --eval.steps, or limit --eval.max_samples",
    "save": "set --ckpt.async_save, raise --ckpt.save_steps, or use a faster disk",
}
"""Phase -> remedy that makes it faster."""


def speed_findings(run: RunRecord) -> Iterator[Finding]:
    total = run.series("timing/step_total")
    if len(total) < FEWEST:
        return
    phases = [run.series(name) for name in run.names("timing/") if name not in (total.name, "timing/overlap")]
    yield from _slow_steps(total, phases)
    for phase in phases:
        yield from _growth(run, phase, total)
    yield from _uneven_ranks(run)


def _name(phase: Series) -> str:
    return phase.name.removeprefix("timing/")


def _slow_steps(total: Series, phases: list[Series]) -> Iterator[Finding]:
    median = float(np.median(total.values))
    slow = total.steps[(total.values > SLOW * median) & (total.values > median + 1)]
    slow = slow[slow > total.steps[0]]  # the first step warms up
    if not len(slow):
        return
    excess: dict[str, float] = {}
    for phase in phases:
        usual, at = float(np.median(phase.values)), dict(zip(phase.steps, phase.values, strict=True))
        rare = len(phase) < len(total) / 2  # such as evaluations, which a usual step does not have
        extra = [at[step] - (0 if rare else usual) for step in slow if step in at]
        excess[_name(phase)] = sum(max(0.0, seconds) for seconds in extra)
    late, seconds = max(excess.items(), key=lambda item: item[1]) if excess else ("an unknown phase", 0.0)
    whole, lost = float(total.values.sum()), float((total.values[np.isin(total.steps, slow)] - median).sum())
    if not _is_much(lost, total, 0.5 if late == "evaluate" else LOST_SHARE):  # evaluations are wanted
        return
    named = ", ".join(map(str, slow[:6])) + (", ..." if len(slow) > 6 else "")
    yield Finding(
        cause="slow-steps",
        title=f"{len(slow)} of {len(total)} steps are slow: {late} takes the time",
        score=min(0.9, 0.4 + lost / whole),
        evidence=(
            f"steps {named} take more than {SLOW:g} times the median of {median:.3g} s, together "
            f"{lost:.3g} s ({lost / whole:.0%} of the run) more",
            f"{late} accounts for {seconds:.3g} s of that",
        ),
        remedy=REMEDIES.get(late, "compare the steps' samples: `openrlhf rollouts RUN --step N`"),
    )


def _is_much(lost: float, total: Series, share: float = LOST_SHARE) -> bool:
    return lost > max(LOST_SECONDS, share * float(total.values.sum()))


def _growth(run: RunRecord, phase: Series, total: Series) -> Iterator[Finding]:
    share, lost = float(phase.values.sum() / total.values.sum()), float((phase.values - phase.start).sum())
    if phase.trend < 3 or phase.end < SLOW * phase.start or not _is_much(lost, total):
        return
    length = run.series("rollout/response_length_mean")
    evidence = [f"{phase.describe()}, {share:.0%} of the run; {lost:.3g} s more than with its first times"]
    longer = len(length) > 0 and length.end > 1.3 * length.start
    if longer:
        evidence.append(f"answers became longer: {length.describe()}")
    yield Finding(
        cause="slow-steps",
        title=f"{_name(phase)} becomes slower{', with longer answers' if longer else ''}",
        score=0.5 if longer else 0.65,
        evidence=tuple(evidence),
        remedy=REMEDIES.get(_name(phase), "look for another program on the machine, or a full disk"),
    )


def _uneven_ranks(run: RunRecord) -> Iterator[Finding]:
    shares = []
    for step, path in list(run.journal.items())[-3:]:
        table = read_table(path, ["ranks", "token_ids"]).to_pylist()
        tokens: Counter[int] = Counter()
        for row in table:
            for rank in row["ranks"] or ():
                tokens[rank] += len(row["token_ids"])
        if len(tokens) > 1:
            rank, most = tokens.most_common(1)[0]
            shares.append((most * len(tokens) / sum(tokens.values()), rank, step))
    if not shares or min(shares)[0] < UNEVEN:
        return
    ratio, rank, step = max(shares)
    yield Finding(
        cause="late-rank",
        title=f"rank {rank} trains on more tokens than the others, which wait for it",
        score=0.6,
        evidence=(f"step {step}: {ratio:.2g} times the mean number of tokens of a rank",),
        remedy="set --train.dynamic_batch_enable, which distributes the work evenly over ranks",
    )
