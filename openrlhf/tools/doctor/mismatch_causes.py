"""Finds the cause of a mismatch: recomputes log-probs under each hypothesis, and ranks hypotheses by the
fraction of the mismatch that they explain. Without the model, or if none explains the mismatch, statistics of
the rollouts decide."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.api import not_none
from openrlhf.tools.doctor.mismatch import Mismatch, MismatchRow, Signs, compute_signs
from openrlhf.tools.doctor.recompute import (
    MOST_LOGITS,
    Recomputed,
    find_checkpoints,
    find_nucleus,
    hooked,
    log_probs,
    replaced,
    tokenizer_at,
)
from openrlhf.tools.doctor.record import CERTAIN, LIKELY, RunRecord

ROWS, ACTIONS, TOKENS = 24, 2048, 4096
"""Maximum numbers of sequences, actions and tokens that are recomputed."""
EXACT = 0.1
"""Maximum fraction of the mismatch that a hypothesis may leave unexplained to count as the explanation."""
NEGLIGIBLE = 0.1
"""Maximum score of a cause that is not mentioned."""
TEMPERATURES = (*map(float, np.geomspace(0.25, 3.0, 26).round(3)), 0.6, 0.7, 0.8, 0.9, 1.0)
TOP_P = (0.5, 0.8, 0.9, 0.95, 0.99)
TOP_K = (1, 10, 20, 40, 50, 64)
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
FACTORS = (0.5, 2.0, 4.0, 8.0, 16.0)
DRAWS = 4
"""Number of passes with different random numbers, for hypotheses about randomness."""
ROUTER_NOISE = 0.05
"""Standard deviation of the noise on a router's input, as a fraction of that of the input."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A possible cause of a mismatch."""

    name: str
    score: float
    evidence: tuple[str, ...]


@dataclass(eq=False)
class Examined:
    """The sequences of a step, a model, and the log-probs that both sides should have."""

    mismatch: Mismatch
    step: int
    rows: Sequence[MismatchRow]
    policy: Recomputed
    others: dict[int, str]
    """Weight version -> model, for versions before that of `policy`."""
    first: str
    """Model that the run started from. Its tokenizer is the run's."""
    is_trainers: bool
    """True if `policy` has the trainer's weights; False if only an earlier version is available."""
    deadline: float
    """Value of time.monotonic() after which nothing more is recomputed."""

    @property
    def run(self) -> RunRecord:
        return self.mismatch.run

    @cached_property
    def targets(self) -> Tensor:
        return torch.tensor(np.concatenate([row.token_ids[row.actions] for row in self.rows])).long()

    @cached_property
    def logits(self) -> Tensor:
        return self.policy.all_logits(self.rows)

    @cached_property
    def temperature(self) -> float | Tensor:
        """The sampling temperature; (A, 1), that of each action, if tasks have their own."""
        whole = float(self.run.flag("rollout.temperature", 1.0))
        own = [float(self.run.flag(f"tasks.{row.source}.temperature", whole)) for row in self.rows]
        if {*own} <= {whole}:
            return whole
        return torch.tensor(own).repeat_interleave(torch.tensor([len(r.actions) for r in self.rows]))[:, None]

    @cached_property
    def nucleus(self) -> Tensor | None:
        """The sampler's nucleus, (A, V); None: all tokens."""
        return self.find_nucleus(self.logits, self.temperature)

    def find_nucleus(self, logits: Tensor, temperature: float | Tensor) -> Tensor | None:
        has, limits = self.run.has_nucleus, self.run.limits
        return find_nucleus(logits, self.targets, temperature, *limits) if has else None

    def over(self, nucleus: Tensor | None) -> np.ndarray:
        """Returns the log-probs of the actions, (A,), normalised over this nucleus."""
        return log_probs(self.logits, self.targets, self.temperature, nucleus)

    def either(self, logits: Tensor | None = None, temperature: float | None = None) -> np.ndarray:
        """Returns the log-probs of both sides, (2, 2, A), if the sampler has these logits and temperature, or
        if the trainer has them. A trainer over the recorded nucleus takes over the sampler's."""
        changed = (
            self.logits if logits is None else logits,
            self.temperature if temperature is None else temperature,
        )
        nucleus = self.find_nucleus(*changed)
        lp = lambda of: log_probs(changed[0], self.targets, changed[1], of)
        sampler = trainer = lp(nucleus)
        if self.run.has_nucleus:
            trainer = lp(self.nucleus if self.run.keeps_nucleus else None)
        takes_over = self.run.keeps_nucleus and self.is_trainers
        of_trainer = self.over(nucleus) if takes_over else self.expected[1]
        return np.array([[sampler, of_trainer], [self.expected[0], trainer]])

    @cached_property
    def sampler(self) -> np.ndarray:
        return np.concatenate([row.sampler for row in self.rows])

    @cached_property
    def trainer(self) -> np.ndarray:
        return np.concatenate([row.trainer for row in self.rows])

    @cached_property
    def expected(self) -> np.ndarray:
        """Log-probs that both sides should have, (2, A): recomputed, or without weights the trainer's."""
        if not self.is_trainers:
            return np.array([self.trainer] * 2)
        return np.array(
            [self.over(self.nucleus), self.over(self.nucleus if self.run.keeps_nucleus else None)]
        )

    @cached_property
    def size(self) -> float:
        return float(np.abs(self.trainer - self.sampler).mean())

    def left(self, cases: np.ndarray) -> float:
        """Returns the fraction of the mismatch that remains with both sides as in a case of (N, 2, A)."""
        far = np.abs(np.array([self.sampler, self.trainer]) - cases)
        return float(far.mean(-1).sum(-1).min()) / self.size

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_at(self.first)


Variants = Iterator[tuple[str, np.ndarray]]
"""(description, log-probs of both sides in each case, (N, 2, A)) of each variant of a hypothesis."""


def explain(mismatch: Mismatch, model: Path | None, deadline: float) -> list[Cause]:
    """Returns at most three causes, the likeliest first. `deadline`: value of time.monotonic() after which no
    more models are loaded."""
    signs = compute_signs(mismatch.rows[mismatch.above[0]])
    examined, problem = examine(mismatch, model, deadline)
    found: list[Cause] = []
    if examined is not None:
        signs = compute_signs(examined.rows)
        for cause in _test_hypotheses(examined, signs):
            found.append(cause)
            if cause.score >= CERTAIN:
                return [cause]
    if max((cause.score for cause in found), default=0.0) < LIKELY:
        is_late = examined is not None and not examined.in_time
        note = problem or (
            "the time limit for recomputing log-probs was reached before a hypothesis explained the gap"
            if is_late
            else "no hypothesis that can be recomputed explains the gap"
        )
        found += _score_signs(
            mismatch, signs, has_experts=bool(examined and examined.policy.routers), note=note
        )
    best: dict[str, Cause] = {}
    for cause in sorted(found, key=lambda cause: -cause.score):
        best.setdefault(cause.name, cause)
    return [cause for cause in best.values() if cause.score > NEGLIGIBLE][:3]


def _test_hypotheses(examined: Examined, signs: Signs) -> Iterator[Cause]:
    if cause := _test_text(examined):
        yield cause
    for test in HYPOTHESES:
        if examined.in_time and (cause := _tested(examined, *test)):
            yield cause
    yield from _test_noise(examined, signs)


def examine(mismatch: Mismatch, model: Path | None, deadline: float) -> tuple[Examined | None, str]:
    """Loads the weights for the first step with a mismatch that has a checkpoint of them, or else an earlier
    version for the first step with a mismatch. Returns (None, reason) if they cannot be loaded."""
    run = mismatch.run
    folder, first = run.checkpoint_folder, str(model or run.locate(run.flag("actor.model_name_or_path", "")))
    weights = {0: first} | find_checkpoints(folder) | find_checkpoints(folder / "_actor")
    try:
        step, version, policy = _load(mismatch, weights)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return None, f"the model {first!r} cannot be loaded ({reason}); name its folder by --model"
    rows = _few(mismatch.rows[step], policy.vocabulary)
    others = {v: path for v, path in weights.items() if v < version}
    return Examined(mismatch, step, rows, policy, others, first, version == step - 1, deadline), ""


def _load(mismatch: Mismatch, weights: dict[int, str]) -> tuple[int, int, Recomputed]:
    """Returns the first step with a mismatch whose weights are at hand, their version and the model. Removes
    from `weights` copies of checkpoints that cannot be loaded: a live run may have deleted them. Raises
    OSError or ValueError if the first model cannot be loaded."""
    while True:
        step = next((step for step in mismatch.above if step - 1 in weights), mismatch.above[0])
        version = max(version for version in weights if version < step)
        try:
            return step, version, Recomputed.load(weights[version])
        except (OSError, ValueError):
            if version == 0:
                raise
            del weights[version]


def _few(rows: Sequence[MismatchRow], vocabulary: int) -> list[MismatchRow]:
    """Returns as many of the first rows as the limits allow, at least one."""
    found: list[MismatchRow] = []
    actions = tokens = 0
    for row in rows:
        actions, tokens = actions + len(row.actions), tokens + len(row.token_ids)
        is_much = actions > min(ACTIONS, MOST_LOGITS // vocabulary) or tokens > TOKENS
        if found and (is_much or len(found) == ROWS):
            break
        found.append(row)
    return found


def _tested(examined: Examined, name: str, variants: Callable[[Examined], Variants]) -> Cause | None:
    """Returns the best variant of a hypothesis until the deadline as a cause; None if there are none."""
    best: tuple[float, str] | None = None
    for text, changed in variants(examined):
        left = examined.left(changed)
        if best is None or left < best[0]:
            best = left, text
        if not examined.in_time:
            break
    if best is None:
        return None
    left, text = best
    score = 0.97 - left / 2 if left < EXACT else 0.6 * max(0.0, 1 - left)
    count = f"{len(examined.rows)} sequences, {len(examined.sampler)} actions of step {examined.step}"
    return Cause(name, score, (f"{text}: explains {max(0.0, 1 - left):.0%} of the gap ({count})",))


# ---- hypotheses that predict log-probs


def _temperature(e: Examined) -> Variants:
    given, known = float(e.run.flag("rollout.temperature", 1.0)), {*TEMPERATURES, 1.0}
    of_tasks = isinstance(e.temperature, Tensor)
    for temperature in sorted(known | {given} if of_tasks else known - {given}):
        other = "those of the tasks" if of_tasks else f"{given:g}"
        text = f"temperature {temperature:g} on one side, {other} on the other"
        yield text, e.either(temperature=temperature)


def _top_p(e: Examined) -> Variants:
    if e.run.has_nucleus:
        over = f"over those of top-p {e.run.limits[0]:g}, top-k {e.run.limits[1]}"
        cases = [[e.over(e.nucleus), e.over(None)], [e.over(None), e.over(e.nucleus)]]
        if e.run.keeps_nucleus:
            yield f"one side normalises over all tokens, the other {over}", np.array(cases)
        else:
            text = f"--rollout.max_kept_tokens 0: the sampler normalises {over}, the trainer over all tokens"
            yield text, np.array(cases[:1])
        return
    for top_p, top_k in [*((p, -1) for p in TOP_P), *((1.0, k) for k in TOP_K)]:
        inside = e.over(find_nucleus(e.logits, e.targets, e.temperature, top_p, top_k))
        text = f"one side uses top-p {top_p:g}" if top_p < 1 else f"one side uses top-k {top_k}"
        cases = np.array([[inside, e.expected[1]], [e.expected[0], inside]])
        yield f"{text}, which --rollout does not set", cases


def _nuclei(e: Examined) -> Variants:
    if not e.run.keeps_nucleus:
        return
    for shift in (1, -1):
        moved = e.over(not_none(e.nucleus).roll(shift, 0).scatter(1, e.targets[:, None], True))
        text = f"one side has the nucleus of the {'previous' if shift > 0 else 'next'} action"
        yield text, np.array([[moved, e.expected[1]], [e.expected[0], moved]])


def _rope(e: Examined) -> Variants:
    config = e.policy.model.config.get_text_config()
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    theta = float(parameters.get("rope_theta") or 0.0)  # 0: it differs by layer
    changes: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    for wrong in THETAS if theta > 0 else ():
        if wrong != theta:
            power = float(np.log(wrong) / np.log(theta))
            changes.append((f"rope_theta {wrong:g} instead of {theta:g}", lambda f, power=power: f**power))
    for factor in FACTORS:
        changes.append((f"positions scaled by 1/{factor:g}", lambda f, factor=factor: f / factor))
    for text, change in changes if e.policy.frequencies else ():
        with replaced(e.policy.frequencies, "inv_freq", change):
            yield f"one side has {text}", e.either(e.policy.all_logits(e.rows))


def _earlier_weights(e: Examined) -> Variants:
    if not e.is_trainers:
        yield f"the sampler computes with the weights of {e.policy.path}", e.either(e.logits)
    for version, model in _others(e):
        logits = model.all_logits(e.rows)
        yield f"the sampler computes with version {version}, {model.path}", e.either(logits)


def _others(e: Examined) -> Iterator[tuple[int, Recomputed]]:
    """Yields (version, model) of earlier versions, the newest first, without those that are gone by now."""
    for version, path in sorted(e.others.items(), reverse=True):
        try:
            model = Recomputed.load(path)
        except (OSError, ValueError):
            continue
        yield version, model


def _stale(e: Examined) -> Variants:
    if not e.run.has_adapters:
        yield from _earlier_weights(e)


def _adapter(e: Examined) -> Variants:
    if hasattr(e.policy.model, "peft_config"):
        e.policy.model.disable_adapters()
        logits = e.policy.all_logits(e.rows)
        e.policy.model.enable_adapters()
        yield "one side computes without the adapter", e.either(logits)
    if e.run.has_adapters:
        for text, changed in _earlier_weights(e):
            yield f"{text}, without the trained adapter", changed


def _template(e: Examined) -> Variants:
    for text, prompt_of in _prompts(e):
        changed = [_after(row, np.array(prompt_of(row), int)) for row in e.rows]
        yield f"one side has the prompt {text}", e.either(e.policy.logits(e.policy.hidden(e.rows, changed)))


def _after(row: MismatchRow, prompt: np.ndarray) -> np.ndarray:
    """Returns the tokens of the row's answer after another prompt, if it has any."""
    return np.concatenate([prompt, row.token_ids[row.prompt_length :]]) if len(prompt) else row.token_ids


def _prompts(e: Examined) -> Iterator[tuple[str, Callable[[MismatchRow], Sequence[int]]]]:
    """Yields (description, function from a row to its prompt's tokens) of prompts by wrong templates."""
    own = lambda row: row.token_ids[: row.prompt_length].tolist()
    for count in (1, 2, 3):
        yield f"without its first {count} tokens", lambda row, count=count: own(row)[count:]
        yield f"without its last {count} tokens", lambda row, count=count: own(row)[: -count or None]
    yield "with its first token twice", lambda row: own(row)[:1] + own(row)
    tokenizer = e.tokenizer
    if tokenizer is None:
        return
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    plain = lambda row: [token for token in own(row) if token not in special]
    yield "without the template's special tokens", plain
    for text, token in (
        ("the first token", tokenizer.bos_token_id),
        ("an end token", tokenizer.eos_token_id),
    ):
        if token is not None:
            yield f"with {text} of the tokenizer before it", lambda row, token=token: [token, *own(row)]
    yield "encoded with special tokens", lambda row: tokenizer(row.prompt)["input_ids"]
    if not tokenizer.chat_template:
        return
    for system in ("", "You are a helpful assistant."):
        first = [{"role": "system", "content": system}] if system else []

        def chat(row: MismatchRow, first: list = first) -> list[int]:
            user = tokenizer.decode(plain(row))
            messages = [*first, {"role": "user", "content": user}]
            options = {"tokenize": False, "strftime_now": e.run.start_day.strftime}
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        yield f"in the chat template of the model{' with a system prompt' if system else ''}", chat


def _precision(e: Examined) -> Variants:
    low = torch.bfloat16
    hidden = e.policy.hidden(e.rows)
    weight = e.policy.head.weight
    with torch.no_grad():
        rounded = e.policy.transformed(hidden.to(low) @ weight.to(low).T)
        yield "one side computes the head in bf16", e.either(rounded)
        yield "one side rounds logits to bf16", e.either(e.logits.to(low).float())
        of_rounded = e.policy.transformed(hidden @ weight.to(low).float().T)
        yield "one side rounds the head's weights to bf16", e.either(of_rounded)
        if not e.run.has_nucleus:
            soft = log_probs((rounded / e.temperature).to(low), e.targets, 1.0)
            of_sampler, of_trainer = e.expected
            cases = np.array([[soft, of_trainer], [of_sampler, soft]])
            yield "one side computes log-softmax in bf16", cases


def _routing(e: Examined) -> Variants:
    routers = e.policy.routers
    if not routers:
        return
    with hooked(routers, lambda x: x.to(torch.bfloat16).float()):
        yield "one side rounds the router's input to bf16", e.either(e.policy.all_logits(e.rows))
    for change in (-1, 1):
        if count := routers[0].top_k + change:
            with replaced(routers, "top_k", lambda top_k, change=change: top_k + change):
                yield f"one side chooses {count} experts", e.either(e.policy.all_logits(e.rows))


def _chunk(e: Examined) -> Variants:
    found = next(_others(e), None) if e.is_trainers else None
    if found is None:
        return
    earlier = found[1].model.state_dict()
    for name, weight in e.policy.model.named_parameters():
        old = earlier.get(name)
        if old is None or old.shape != weight.shape or torch.equal(old, weight):
            continue
        with replaced([weight], "data", lambda _, old=old: old):
            changed = e.either(e.policy.all_logits(e.rows))
        yield f"{name} is that of an earlier version on one side", changed


HYPOTHESES: tuple[tuple[str, Callable[[Examined], Variants]], ...] = (
    ("stale-weights", _stale),
    ("adapter", _adapter),
    ("top-p", _top_p),
    ("temperature", _temperature),
    ("kept-sets", _nuclei),
    ("head-precision", _precision),
    ("template", _template),
    ("routing", _routing),
    ("rope", _rope),
    ("weight-chunk", _chunk),
)
"""(cause, function that yields its variants), the cheapest first."""


# ---- hypotheses that predict no log-probs


def _test_text(e: Examined) -> Cause | None:
    """Returns the tokenizer as the cause if half of the recorded answers do not decode to their text."""
    if e.tokenizer is None:
        return None
    answered = [row for row in e.rows if row.response]
    wrong = [row for row in answered if not _same_text(e, row.token_ids[row.prompt_length :], row.response)]
    if not answered or len(wrong) < 0.5 * len(answered):
        return None
    row = wrong[0]
    decoded = e.tokenizer.decode(row.token_ids[row.prompt_length :].tolist())
    text = (
        f"the tokens of {len(wrong)} of {len(answered)} answers are not those of their text: they decode to "
    )
    return Cause("tokenizer", 0.96, (f"{text}{decoded[:60]!r} instead of {(row.response or '')[:60]!r}",))


def _same_text(e: Examined, token_ids: np.ndarray, text: str | None) -> bool:
    """Compares texts without special tokens and white space, which decoders treat differently."""
    decoded = e.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    added = (str(token) for token in e.tokenizer.added_tokens_decoder.values() if token.special)
    for token in (*e.tokenizer.all_special_tokens, *added):
        text = (text or "").replace(token, "")
    return "".join(decoded.split()) == "".join((text or "").split())


def _test_noise(e: Examined, signs: Signs) -> Iterator[Cause]:
    if not e.is_trainers or not e.in_time:
        return
    if dropout := _spread(e, _with_dropout):
        yield _noise("dropout", "passes with dropout", *dropout, signs)
    if e.policy.routers and (routing := _spread(e, _with_router_noise)):
        yield _noise("routing", "passes with noise on the routers", *routing, signs)


def _noise(name: str, passes: str, ratio: float, similar: float, signs: Signs) -> Cause:
    random = 0.0 if np.isnan(signs.random) else min(1.0, signs.random)
    score = min(0.95, 0.6 * (0.5 < ratio < 2) + 0.3 * max(0.0, similar) + 0.5 * random)
    evidence = [
        f"{passes} differ by {ratio:.2g} times the gap, at the same actions (rank correlation {similar:.2f})"
    ]
    if random > 0.1:
        evidence.append(f"log-probs of equal actions after equal tokens differ by {random:.0%} of the gap")
    return Cause(name, score if random > 0.1 or np.isnan(signs.random) else score / 2, tuple(evidence))


def _with_dropout(e: Examined) -> Tensor:
    e.policy.model.train()
    try:
        return e.policy.all_logits(e.rows)
    finally:
        e.policy.model.eval()


def _with_router_noise(e: Examined) -> Tensor:
    with hooked(e.policy.routers, lambda x: x + ROUTER_NOISE * x.std() * torch.randn_like(x)):
        return e.policy.all_logits(e.rows)


def _spread(e: Examined, draw: Callable[[Examined], Tensor]) -> tuple[float, float] | None:
    """Returns the mean difference between random passes and the expected log-probs, as a multiple of the
    mismatch, and its rank correlation with the mismatch by action. None if the passes are not random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = [np.abs(e.either(draw(e))[0, 0] - e.expected[0]) for _ in range(DRAWS)]
    mean = np.mean(draws, axis=0)
    if not mean.max() > 1e-4:
        return None
    return float(mean.mean() / e.size), _rank_correlation(mean, np.abs(e.trainer - e.sampler))


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    ranks = [values.argsort().argsort() for values in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(x) > 2 else 0.0


def _score_signs(mismatch: Mismatch, signs: Signs, *, has_experts: bool, note: str) -> list[Cause]:
    """Scores causes by statistics of the rollouts alone. `note`: reason why no hypothesis decided."""
    run = mismatch.run
    random = not np.isnan(signs.random) and signs.random > 0.1
    text = (
        f"{note}; signs: bias {signs.bias:+.2f}, median/mean {signs.quiet:.2f}, {signs.curve:.0%} a function "
        f"of the log-prob, later/earlier positions {signs.growth:.2g}, first/other actions {signs.onset:.2g}"
        f"{'' if np.isnan(signs.random) else f', {signs.random:.0%} random'}"
    )
    scores = {
        "temperature": 0.55 * (signs.curve > 0.5) * (abs(signs.bias) < 0.95),
        "top-p": 0.6 * run.has_nucleus * (abs(signs.bias) > 0.95),
        "kept-sets": 0.5 * run.keeps_nucleus * (abs(signs.bias) <= 0.95),
        "rope": 0.5 * (signs.growth > 1.6) * mismatch.from_start,
        "template": 0.5 * (signs.onset > 2) * mismatch.from_start,
        "head-precision": 0.45 * (abs(signs.bias) < 0.3) * (signs.size < 0.03) * mismatch.from_start,
        "routing": has_experts * (0.7 if random or signs.quiet < 0.35 else 0.4),
        "dropout": 0.65 * random * (0.6 if has_experts else 1),
        "adapter": 0.58 * run.has_adapters * (not mismatch.from_start) * (not random),
        "stale-weights": 0.5 * (not mismatch.from_start) * (not random),
        "weight-chunk": (0.3 if mismatch.from_start else 0.55) * (not random),
        "tokenizer": 0.4 * (signs.size > 1) * mismatch.from_start,
    }
    return [Cause(name, score, (text,)) for name, score in scores.items() if score > 0]
