"""Truncated sampling: kept sets are recorded, stay with their actions, and define the distribution of the
trainer's log-probs."""

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import Engine
from records import kept_sets, plain, sets_of, trajectory
from sampled_logits import LOGITS, Sampled

from openrlhf.algorithms.logprobs import linear_log_probs
from openrlhf.completions import SamplingParams
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.rows import PackedRow
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.types import Batch, Nuclei, PromptGroup, Trajectory, Turn, not_none

A, H, V = 9, 5, 17


# ---- log-probs


ROWS = torch.tensor(
    [
        [3, 8, 16, 0],
        [5, 5, 5, 5],  # one token, whose probability is 1
        [-1, -1, -1, -1],  # all tokens
        [7, 2, 7, 7],
        [0, 1, 2, 3],
        [-1, -1, -1, -1],
        [16, 15, 14, 13],
        [9, 4, 9, 9],
        [2, 6, 10, 2],
    ]
)
TARGETS = torch.tensor([8, 5, 11, 7, 3, 0, 16, 4, 10])


def by_hand(hidden, weight, bias, scale: float, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one action at a time, over nothing but its own tokens."""
    log_probs, entropies = [], []
    for h, row, target in zip(hidden, ROWS.tolist(), TARGETS.tolist(), strict=True):
        ids = list(range(V)) if row[0] < 0 else sorted({*row})
        logits = weight[ids] @ h + bias[ids]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        of_ids = torch.log_softmax(scale * logits, -1)
        log_probs.append(of_ids[ids.index(target)])
        entropies.append(-(of_ids.exp() * of_ids).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (A, H), (V, H), (V,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("chunk", [1, 4, A])
@pytest.mark.parametrize("options", [{"scale": 1 / 0.7}, {"softcap": 2.0, "scale": 3.0}])
def test_log_probs_entropies_and_gradients_are_those_of_the_kept_tokens(chunk, options):
    results = []
    for compute in (
        lambda h, w, b: by_hand(h, w, b, options["scale"], options.get("softcap")),
        lambda h, w, b: linear_log_probs(
            h, w, TARGETS, bias=b, kept=ROWS, with_entropy=True, chunk=chunk, **options
        ),
    ):
        hidden, weight, bias = inputs()
        log_probs, entropy = compute(hidden, weight, bias)
        mix = torch.arange(1.0, A + 1, dtype=torch.float64)
        (log_probs * mix - entropy * mix.flip(0)).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad, bias.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_a_head_that_does_not_learn() -> None:
    """The gradients of a frozen head are made in the forward pass."""
    grads = []
    for compute in (
        lambda h, w, b: by_hand(h, w, b, 1.0, None)[0],
        lambda h, w, b: linear_log_probs(h, w, TARGETS, bias=b, kept=ROWS, chunk=4)[0],
    ):
        hidden, weight, bias = inputs()
        compute(hidden, weight.detach(), bias.detach()).square().sum().backward()
        grads.append(hidden.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-12, rtol=1e-12)


def test_float32_where_tokens_are_excluded() -> None:
    hidden, weight, bias = [x.detach().float().requires_grad_() for x in inputs()]
    log_probs, entropy = linear_log_probs(
        hidden, weight, TARGETS, bias=bias, softcap=0.5, scale=0.1, kept=ROWS, with_entropy=True
    )
    (log_probs.sum() - 1e4 * not_none(entropy).sum()).backward()
    assert all(not_none(x.grad).isfinite().all() for x in (hidden, weight, bias))
    assert log_probs[1] == 0 and 0 <= not_none(entropy)[1] < 1e-30  # one token was kept


def test_sets_of_all_tokens_change_no_bit() -> None:
    plain_, kept = [
        linear_log_probs(*inputs()[:2], TARGETS, kept=kept, with_entropy=True)
        for kept in (None, torch.full((A, 3), -1))
    ]
    assert torch.equal(plain_[0], kept[0]) and torch.equal(not_none(plain_[1]), not_none(kept[1]))


# ---- what an engine answers


def recorded(
    logits: torch.Tensor, tokens: list[int] | None, limit: int, **params: Any
) -> tuple[Turn, torch.Tensor]:
    """Returns the turn, and the log-probs that were sampled from."""
    engine = Sampled(logits, tokens)
    given = SamplingParams(temperature=params.get("temperature", 1.0))
    recording = RecordingEngine(engine, (0,), given, max_kept_tokens=limit)
    asyncio.run(recording.generate([1], SamplingParams(**params)))
    (turn,) = recording.turns
    return turn, not_none(engine.log_probs)


@pytest.mark.parametrize(
    ("limit", "params", "expected"),
    [
        (9, {"top_k": 2}, [[2, 1, 3], [0, 1]]),  # the second and third most likely are equal
        (9, {"top_p": 0.8}, [[2, 1, 3], [0, 1]]),
        (9, {"top_k": 4, "top_p": 0.95}, [[2, 1, 3, 4], [0, 1, 2]]),
    ],
)
def test_kept_sets_by_hand(limit: int, params: dict, expected: list[list[int]]) -> None:
    turn, _ = recorded(LOGITS, [2, 0], limit, **params)
    assert [sorted(one) for one in sets_of(turn.kept, turn.num_actions)] == [sorted(one) for one in expected]
    assert [one[0] for one in sets_of(turn.kept, turn.num_actions)] == [2, 0]  # the sampled tokens


def test_the_share_of_a_set_that_is_too_large() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.85, 0.05, 0.05, 0.05]]).log()
    logits = torch.cat([logits, torch.full((2, V - 4), -50.0)], dim=1)
    turn, _ = recorded(logits, [3, 0], 2, top_p=0.93)
    assert sorted(sets_of(turn.kept, 2)[0]) == [0, 1, 3]  # the sampled token is always among them
    np.testing.assert_allclose(np.exp(not_none(turn.kept).log_masses), [0.8, 0.9 / 0.95], rtol=1e-6)


@pytest.mark.parametrize("limit", [1, 2, 5, V])
@pytest.mark.parametrize("params", [{"top_k": 4}, {"top_p": 0.8}, {"top_p": 0.9, "top_k": 6}])
def test_with_the_samplers_weights_the_log_probs_are_the_samplers(limit: int, params: dict) -> None:
    """Log-probs agree also where sets are larger than what is recorded, and where logits are equal at their
    border."""
    torch.manual_seed(1)
    logits = (torch.randn(200, V) * 2).round()
    turn, sampler = recorded(logits, None, limit, **params)
    sets = not_none(turn.kept)
    tokens, ids = torch.from_numpy(turn.action_ids).long(), torch.from_numpy(sets.padded())
    found, _ = linear_log_probs(logits, torch.eye(V), tokens, kept=ids)
    found = found + torch.from_numpy(sets.log_masses)
    # Each side rounds three numbers below 16, by 2^-21 each.
    torch.testing.assert_close(found, torch.from_numpy(turn.log_probs), atol=6 * 2**-21, rtol=0)
    whole = sets.counts == sampler.isfinite().sum(1).numpy()
    assert (sets.log_masses[whole] > -1e-6).all() and (sets.log_masses[~whole] < -1e-6).all()
    assert whole.all() or limit < V or "top_k" in params


def asked(limit: int, **params: Any) -> int | None:
    fake = Engine([5])
    given = SamplingParams(temperature=params.get("temperature", 1.0))
    recording = RecordingEngine(fake, (0,), given, max_kept_tokens=limit)
    asyncio.run(recording.generate([1], SamplingParams(**params)))
    return fake.asked[0][1].logprobs


def test_what_a_request_asks_for() -> None:
    assert asked(50) == 0 and asked(50, temperature=0.0, top_p=0.9) == 0  # nothing is left out
    assert asked(0, top_p=0.9, top_k=5) == 0
    assert asked(50, top_p=0.9) == asked(50, min_p=0.1) == 50
    assert asked(50, top_k=20) == 21 and asked(10, top_k=20, top_p=0.5) == 10
    assert asked(50, top_k=2, logprobs=7) == 7 and asked(50, top_p=0.9, logprobs=7) == 50
    assert asked(50, top_p=0.9, logprobs=-1) == -1


def test_answers_without_tokens_and_requests_that_keep_all() -> None:
    turn, _ = recorded(LOGITS[:0], [], 4, top_p=0.9)
    assert sets_of(turn.kept, 0) == []
    turn, _ = recorded(LOGITS, [2, 0], 4)
    assert turn.kept is None


# ---- sets stay with their actions


def test_parts_put_together() -> None:
    sets = kept_sets([4, 7], [], [3], [1, 2, 3], shares=[0.5, 1, 1, 0.25])
    assert sets_of(sets, 4) == [[4, 7], [], [3], [1, 2, 3]]
    assert sets.padded().tolist() == [[4, 7, 4], [-1, -1, -1], [3, 3, 3], [1, 2, 3]]
    both = not_none(Nuclei.joined(sets.parts([slice(3, 4), slice(0, 2)])))
    assert sets_of(both, 3) == [[1, 2, 3], [4, 7], []]
    np.testing.assert_allclose(np.exp(both.log_masses), [0.25, 0.5, 1])
    assert kept_sets().padded().shape == (0, 1)


ONE = trajectory(actions=(4, 3), kept=kept_sets([4, 7], [3], shares=[0.5, 1]))
OTHER = trajectory(actions=(5,))
"""Trajectory whose action was sampled from all tokens."""


def test_a_row_of_some_sequences() -> None:
    batch = Batch.of([OTHER, ONE])
    assert sets_of(batch.kept, 3) == [[], [4, 7], [3]]
    row = PackedRow.from_batch(batch.select([1, 0]))
    assert not_none(row.kept_ids).tolist() == [[4, 7], [3, 3], [-1, -1]]
    np.testing.assert_allclose(not_none(row.log_masses).exp(), [0.5, 1, 1])
    alone = PackedRow.from_batch(Batch.of([OTHER]))
    assert alone.kept_ids is None and alone.log_masses is None
    assert PackedRow.from_batch(batch.select([])).kept_ids is None


def test_a_group_arrives_with_its_sets() -> None:
    group = PromptGroup(prompt=ONE.prompt, trajectories=[OTHER, ONE, replace(ONE, part=1)])
    arrived = pickle.loads(pickle.dumps(group)).trajectories
    assert [sets_of(t.kept, t.num_actions) for t in arrived] == [[[]], [[4, 7], [3]], [[4, 7], [3]]]
    assert plain(arrived[1:]) == plain(group.trajectories[1:])
    without = pickle.loads(pickle.dumps(PromptGroup(prompt=ONE.prompt, trajectories=[OTHER])))
    assert without.trajectories[0].kept is None


# ---- the model


def test_a_policy_reads_a_row_as_it_reads_its_sequences(tmp_path: Path) -> None:
    """Log-probs, entropies and gradients are the same whatever else is in the row; an action of all tokens is
    computed as without kept sets."""
    folder = tiny_chat_model(tmp_path / "model")
    model = PolicyModel(load_causal_lm(folder, flag="--model", dtype="fp32", attention="auto"))
    short, other = trajectory(actions=(6, 9), kept=kept_sets([6, 11, 4], [9])), trajectory(actions=(5, 8, 7))
    cut = trajectory(actions=(7, 7), kept=kept_sets([7, 5], [], shares=[0.5, 1]))

    def read(*trajectories: Trajectory) -> tuple[list[torch.Tensor], torch.Tensor]:
        model.zero_grad()
        row = PackedRow.from_batch(Batch.of(trajectories))
        scores = model(row, temperature=0.8, with_entropy=True)
        (scores.log_probs.sum() + not_none(scores.entropy).sum()).backward()
        return [scores.log_probs, not_none(scores.entropy)], not_none(model.model.lm_head.weight.grad).clone()

    alone = [read(t) for t in (short, other, cut)]
    together, gradient = read(short, other, cut)
    for i, whole in enumerate(together):
        torch.testing.assert_close(whole, torch.cat([scores[i] for scores, _ in alone]), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, sum(g for _, g in alone), atol=1e-5, rtol=0)
    log_probs = together[0].detach()
    assert log_probs[1] == 0  # the only token that was kept
    assert float(log_probs[5]) < np.log(0.5)
    (full, _), _ = read(replace(cut, kept=None))
    assert log_probs[6].item() == pytest.approx(full[1].item(), abs=1e-5)
