"""Findings about the gap between sampler and trainer: its causes, with their evidence and remedies."""

import time
from collections.abc import Iterator
from pathlib import Path

from openrlhf.tools.doctor.mismatch import find_noise, measure_mismatch, stale_steps
from openrlhf.tools.doctor.record import Finding, RunRecord, Series

BUDGET = 90.0
"""Maximum seconds for loading models and recomputing log-probs."""

REMEDIES = {
    "temperature": "make sampler and trainer use one temperature: set only --rollout.temperature, and no "
    "other one in an agent or server",
    "top-p": "set --rollout.max_kept_tokens above 0, or --rollout.top_p 1 and --rollout.top_k -1; look for "
    "top_p or top_k in the model's generation_config.json",
    "kept-sets": "look at what an agent does with the tokens of a turn, because nuclei reach the trainer "
    "with other tokens than their own; --rollout.top_p 1 and --rollout.top_k -1 avoid the problem",
    "rope": "compare rope_theta and rope_scaling in the model's config.json with the values that the engine "
    "loads",
    "stale-weights": "set --vllm.sync_check_steps 1, and lower --train.async_queue_size if steps are sampled "
    "ahead",
    "adapter": "use --vllm.lora_sync merged",
    "tokenizer": "give sampler and trainer the same tokenizer files; keep the sampled token ids instead of "
    "encoding the text again",
    "template": "give sampler and trainer the same prompt tokens: one chat template and one way to add the "
    "first token (--data.apply_chat_template)",
    "head-precision": "compute the head with the same precision on both sides: --ds.param_dtype, and the "
    "engine's dtype",
    "dropout": "set dropout to 0 in config.json, and --ds.lora.dropout 0",
    "routing": "set --algo.router_replay, so that the trainer routes tokens as the sampler did",
    "weight-chunk": "set --vllm.sync_check_steps 1, which names the wrong weight, and try "
    "--vllm.sync_with_ray",
}
"""Cause of a mismatch -> its remedy."""

TITLES = {
    "temperature": "sampler and trainer use different temperatures",
    "top-p": "only one side applies top-p or top-k",
    "kept-sets": "the trainer normalises over wrong top-p/top-k nuclei",
    "rope": "sampler and trainer use different RoPE frequencies",
    "stale-weights": "the sampler has stale weights",
    "adapter": "the sampler computes without the adapter",
    "tokenizer": "sampler and trainer use different tokenizers",
    "template": "sampler and trainer see different prompts (chat template)",
    "head-precision": "one side computes with lower precision (the head in bf16)",
    "dropout": "one side computes with dropout",
    "routing": "sampler and trainer route tokens to different experts",
    "weight-chunk": "a part of the sampler's weights is wrong",
}


def mismatch_findings(run: RunRecord, model: Path | None = None) -> Iterator[Finding]:
    """Yields the causes of a mismatch. `model`: folder of the weights that step 1 was sampled with; None:
    `--actor.model_name_or_path`."""
    mismatch, of_fresh = measure_mismatch(run), run.series("mismatch/fresh_abs_diff_mean")
    reported = of_fresh if len(of_fresh) else run.series("mismatch/abs_diff_mean")
    if mismatch is None:
        if not stale_steps(run) & {*reported.steps} and reported.last(5) > find_noise(run):
            yield _unexplained(reported, find_noise(run))
        return
    if not mismatch.above:
        return
    from openrlhf.tools.doctor.mismatch_causes import explain  # imports transformers

    shown = ", ".join(f"{value:.2g} (step {step})" for step, value in list(mismatch.course.items())[:5])
    since = "from the first step on" if mismatch.from_start else f"since step {mismatch.above[0]}"
    evidence = (
        f"mean |log r| is {shown} nats; rounding explains up to {mismatch.noise:g}",
        f"the gap exists {since}",
    )
    causes = explain(mismatch, model, deadline=time.monotonic() + BUDGET)
    for cause in causes:
        yield Finding(
            cause=f"gap: {cause.name}",
            title=f"gap between sampler and trainer: {TITLES[cause.name]}",
            score=cause.score,
            evidence=(*evidence, *cause.evidence),
            remedy=f"{REMEDIES[cause.name]}. --algo.advantage.is_correction_enable limits the damage",
        )
        evidence = ()


def _unexplained(mismatch: Series, noise: float) -> Finding:
    above = mismatch.steps[mismatch.values > noise]
    return Finding(
        cause="gap",
        title="gap between sampler and trainer",
        score=0.8,
        evidence=(
            f"{mismatch.describe()}; rounding explains up to {noise:g} nats",
            f"the gap is larger since step {above[0]}; no rollouts have the log-probs of both sides",
        ),
        remedy="set --logger.rollouts full, because the cause can be found from rollouts. "
        "--algo.advantage.is_correction_enable limits the damage",
    )
