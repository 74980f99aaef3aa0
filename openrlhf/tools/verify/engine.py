"""Checks a rollout engine against the trainer: log-probs, seeds, weight syncs and sleep."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from openrlhf.api import (
    Batch,
    EngineOptions,
    LocalEngine,
    PolicyWorker,
    RunError,
    SamplingParams,
    WeightFingerprint,
    build_run_probe,
    differing_weights,
    free_port,
    local_options,
    not_none,
)
from openrlhf.api import WeightLimit as Limit
from openrlhf.api import WeightProbe as Probe
from openrlhf.api import weight_difference as explain_difference
from openrlhf.tools.verify.report import Clock, Finding, judged, not_checked
from openrlhf.tools.verify.subjects import PolicySubject, join_batch, load_prompts, policy_learned

SYNCS = 10
ANSWERS, ANSWER_TOKENS = 4, 24
"""Number of sampled answers, and number of tokens of each."""
MOST_STEPS = 20
"""Maximum number of optimizer steps before a sync."""
NAMES = ("engine", "sampled log-probs", "engine seeds", "one sync", "several syncs", "sleep and wake")
CLAIMS = {
    "engine": "Engine and trainer compute the same log-probs with the weights of the model's files",
    "sampled log-probs": "The log-probs that the engine returns with samples are those of the trainer",
    "engine seeds": "Equal seeds give equal answers, other seeds other answers",
    "one sync": "After optimizer steps and a weight sync the engine computes with the new weights",
    "several syncs": f"The engine computes with the new weights after each of {SYNCS} further syncs",
    "sleep and wake": "The engine computes with the new weights after it slept, woke and received them again",
}
REPORT = "Report it with the file of this verification; samples of this setup are not those of the policy."


class SyncedPair:
    """The trainer's policy and an engine, connected by weight syncs."""

    def __init__(self, worker: PolicyWorker, engine: LocalEngine, options: EngineOptions) -> None:
        self.worker, self.engine, self.version = worker, engine, 0
        self.probe: Probe = build_run_probe(worker.config)
        self.limit = Limit.from_config(worker.config, on_gpu=options.on_gpu)
        worker.open_weight_sync(engine, options.transfer_backend, "127.0.0.1", free_port())

    def trainer(self) -> Tensor:
        """Returns the trainer's log-probs of the probe, (L - 1,)."""
        return self.worker.compute_log_probs(self.probe)

    def difference(self) -> float:
        """Returns the mean absolute difference of the probe's log-probs as a fraction of the limit."""
        theirs = torch.tensor(self.engine.call(self.engine.engine.probe(self.probe.asked)).log_probs)
        return self.relative(theirs, self.trainer())

    def relative(self, found: Tensor, trainer: Tensor) -> float:
        """Returns the mean absolute difference as a fraction of the limit: what rounding explains."""
        return float((found - trainer).abs().mean() / self.limit.allowed(trainer))

    def sync(self) -> None:
        self.version += 1
        not_none(self.worker.send_weights(self.version, self.probe))

    def reason(self) -> str:
        sent = self.worker.weight_fingerprints()
        lengths = {name: fingerprint.length for name, fingerprint in sent.items()}
        stored: dict[str, WeightFingerprint] = self.engine.call(
            self.engine.engine.layer_fingerprints(lengths)
        )
        unwritten = self.engine.call(self.engine.engine.unwritten_parameters())
        return explain_difference(
            unwritten, differing_weights(sent, stored, self.limit.relative), len(stored)
        )


def engine_checks(subject: PolicySubject, dtype: str) -> Iterator[Finding]:
    """Yields the outcome of each check. The engine shares the trainer's device."""
    if why := why_no_engine(subject):
        yield from (not_checked(name, CLAIMS[name], why) for name in NAMES)
        return
    subject.learning |= {"actor.lr_warmup_ratio": 0.0, "actor.lr_scheduler": "constant"}
    with started(subject, subject.worker(subject.configured(dtype, learns=True))) as pair:
        yield from pair_checks(subject, pair)


def why_no_engine(subject: PolicySubject) -> str:
    """Returns the reason why no engine can run in the trainer's process; "" if one can."""
    config = subject.config
    if config.data.reads_images:
        return "the prompts have images"
    if config.vllm.tensor_parallel_size * config.vllm.pipeline_parallel_size > 1:
        return "the engine spans several GPUs (--vllm.tensor_parallel_size, --vllm.pipeline_parallel_size)"
    if config.vllm.lora_sync == "adapter" and config.ds.lora.rank:
        return "adapters are sent separately; each run with adapters checks its engine with random ones"
    return ""


@contextmanager
def started(subject: PolicySubject, worker: PolicyWorker) -> Iterator[SyncedPair]:
    options = local_options(worker.config)
    engine = LocalEngine(options)
    try:
        yield SyncedPair(worker, engine, options)
    finally:
        engine.close()


def pair_checks(subject: PolicySubject, pair: SyncedPair) -> Iterator[Finding]:
    clock = Clock()
    bound = (
        "mean absolute difference of log-probs, as a fraction of the limit of the weight check: "
        f"{pair.limit.relative:.2g} (rounding of {pair.limit.dtype}) times the mean absolute deviation of "
        "the log-probs"
    )

    def compared(check: str, error: float, meaning: str, where: str = "") -> Finding:
        meaning = f"{meaning} {REPORT}"
        seconds, claim = clock.lap(), CLAIMS[check]
        return judged(check, claim, error, 1.0, how=bound, where=where, meaning=meaning, seconds=seconds)

    yield compared(
        "engine",
        pair.difference(),
        "Engine and trainer load the files differently, or use different positions or scalings.",
    )
    yield compared(
        "sampled log-probs",
        sampled_difference(subject, pair),
        "The engine returns log-probs of other tokens, or not at --rollout.temperature.",
    )
    yield seeds_finding(subject, pair, clock)
    batch = subject.batch(pair.worker)
    causes = (
        "The sync leaves out weights or sends old ones, or the engine computes with a copy of weights that "
        "it does not refresh. Try --vllm.sync_with_ray."
    )
    for check, count in (("one sync", 1), ("several syncs", SYNCS)):
        error, where = error_of_syncs(pair, batch, count)
        if error is None:
            yield not_checked(check, CLAIMS[check], where)
        else:
            yield compared(check, error, causes, where)
    yield compared("sleep and wake", *after_sleep(pair))


def sampled_difference(subject: PolicySubject, pair: SyncedPair) -> float:
    """Returns the difference of sampled answers' log-probs to the trainer's, as a fraction of the limit."""
    config, prompts = subject.config, load_prompts(subject.config, subject.size)[:ANSWERS]
    answers = [answer(pair, prompt, config.rollout.temperature, seed=i) for i, prompt in enumerate(prompts)]
    theirs = np.concatenate([log_probs for _, log_probs in answers])
    batch = join_batch(prompts, [tokens for tokens, _ in answers], theirs)
    ours = torch.from_numpy(pair.worker.forward(batch))
    return pair.relative(torch.from_numpy(theirs), ours)


def answer(
    pair: SyncedPair, prompt: list[int], temperature: float, seed: int
) -> tuple[list[int], np.ndarray]:
    """Samples an answer. Returns its tokens and their log-probs (A,)."""
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=ANSWER_TOKENS, logprobs=0, ignore_eos=True
    )
    (found,) = pair.engine.call(pair.engine.engine.generate(list(prompt), params)).outputs
    return list(found.token_ids), not_none(found.log_probs)


def seeds_finding(subject: PolicySubject, pair: SyncedPair, clock: Clock) -> Finding:
    prompt, temperature = load_prompts(subject.config, subject.size)[0], subject.config.rollout.temperature
    (first, _), (again, _), (other, _) = (answer(pair, prompt, temperature, seed) for seed in (1, 1, 2))
    differing = sum(a != b for a, b in zip(first, again, strict=True))
    where = "the tokens of two answers with seed 1" if differing else ""
    if not differing and other == first and temperature > 0:
        differing, where = 1, "seeds 1 and 2, whose answers are equal"
    return judged(
        "engine seeds",
        CLAIMS["engine seeds"],
        float(differing),
        0.0,
        how="number of differing tokens; the same kernels run in the same order, because the engine has no "
        "other requests",
        where=where,
        meaning="The engine does not use the seeds of requests, so samples of a group may be copies of one "
        f"another, or a run cannot be repeated. {REPORT}",
        seconds=clock.lap(),
    )


def error_of_syncs(pair: SyncedPair, batch: Batch, count: int) -> tuple[float | None, str]:
    """Takes optimizer steps and syncs, `count` times. Returns the largest difference after a sync, and that
    sync. The difference is infinite if a sync fails. It is None if optimizer steps change the log-probs too
    little to tell old weights from new ones; the second value is then this reason."""
    worst, where = 0.0, ""
    for i in range(count):
        if not moved(pair, batch):
            return None, f"{MOST_STEPS} optimizer steps hardly changed the trainer's log-probs"
        try:
            pair.sync()
        except RunError as error:
            return math.inf, f"sync {i + 1}: {error}"
        difference = pair.difference()
        if not difference <= 1:
            return difference, f"sync {i + 1}: {pair.reason()}"
        if difference > worst:
            worst, where = difference, f"sync {i + 1}"
    return worst, where


def moved(pair: SyncedPair, batch: Batch) -> bool:
    """Takes optimizer steps until the trainer's log-probs of the probe have changed by more than twice the
    limit, so that the old weights would exceed it. Returns False if `MOST_STEPS` do not suffice."""
    before = pair.trainer()
    for step in range(MOST_STEPS):
        policy_learned(pair.worker, batch, step, step + 1)
        if pair.relative(before, pair.trainer()) > 2:
            return True
    return False


def after_sleep(pair: SyncedPair) -> tuple[float, str, str]:
    """Lets the engine sleep, wakes it and sends the weights. Returns the difference, the usual causes of a
    failure, and the place of the difference."""
    meaning = "Memory that the engine released is not restored, or caches of old weights survive."
    engine = pair.engine.engine
    try:
        pair.engine.call(engine.sleep())
        pair.engine.call(engine.wake(["weights"]))
        pair.sync()
        pair.engine.call(engine.wake(["kv_cache"]))
    except RunError as error:
        return math.inf, meaning, str(error)
    return pair.difference(), meaning, "the probe"
