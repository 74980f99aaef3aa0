"""Score centering: the mean of the centered scores under the sampler is 0."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openrlhf.algorithms.centering import centering

V = 9
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "tis": lambda ratio: ratio.clamp(0.7, 1.3),
    "icepop": lambda ratio: ratio.where((ratio >= 0.7) & (ratio <= 1.3), 0.0),
    "exact": lambda ratio: ratio,
}


def weigh_by(name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    return None if name == "none" else lambda p, q: WEIGHTS[name]((p - q).clamp(-20, 20).exp())


def distributions(num_actions: int = 5) -> tuple[Tensor, Tensor]:
    """Returns logits of the policy, and log-probs of a sampler near it, (A, V)."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(num_actions, V, generator=random, dtype=torch.float64)
    noise = torch.randn(num_actions, V, generator=random, dtype=torch.float64)
    return logits.requires_grad_(), (logits.detach() + noise / 2).log_softmax(-1)


def expected_score(logits: Tensor, sampler: Tensor, name: str) -> Tensor:
    """Returns the mean of w_v grad log p_v over a whole distribution, (A, V), token by token."""
    log_p, total = logits.log_softmax(-1), torch.zeros_like(logits)
    for v in range(logits.shape[1]):
        (score,) = torch.autograd.grad(log_p[:, v].sum(), logits, retain_graph=True)
        weight = WEIGHTS[name]((log_p[:, v] - sampler[:, v]).detach().exp())
        total += (sampler[:, v].exp() * weight)[:, None] * score
    return total


def found_score(logits: Tensor, log_q: Tensor, ids: Tensor, name: str) -> Tensor:
    log_p = logits.log_softmax(-1).gather(1, ids)
    coefs = centering(log_p.detach(), log_q.gather(1, ids), weigh_by(name))
    (gradient,) = torch.autograd.grad((coefs * log_p).sum(), logits, retain_graph=True)
    return gradient


def test_by_hand() -> None:
    """p is .5 .25 .25 and q .6 .3 .1 of three tokens, of which one is recorded: rho is .4 / .5, and
    c = .6 - .8 * .5. With weights cut to 0.9 to 1.1 it is .9 for the token (.5 / .6) and 1.1 for the others
    (.5 / .4): c = .6 * .9 - .8 * 1.1 * .5. Weights that mask leave no token here."""
    p, q = torch.tensor([[0.5]]).log(), torch.tensor([[0.6]]).log()
    assert centering(p, q).item() == pytest.approx(0.2)
    cut = lambda p, q: (p - q).exp().clamp(0.9, 1.1)
    assert centering(p, q, cut).item() == pytest.approx(0.54 - 0.44)
    assert centering(p, q, lambda p, q: torch.zeros_like(p)).item() == 0
    both = centering(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.6, 0.3]]).log())
    assert both.tolist() == [pytest.approx([0.6 - 0.4 * 0.5, 0.3 - 0.4 * 0.25])]


@pytest.mark.parametrize("name", WEIGHTS)
def test_all_tokens_give_the_exact_mean(name: str) -> None:
    """So the mean over the sampler of w_y s_y - mu is 0."""
    logits, sampler = distributions()
    ids = sampler.argsort(-1, descending=True)
    expected = expected_score(logits, sampler, name)
    torch.testing.assert_close(found_score(logits, sampler, ids, name), expected, atol=1e-12, rtol=0)
    assert (expected.abs().max() < 1e-12) == (name == "exact")


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_tail_has_the_policys_proportions(name: str, count: int) -> None:
    logits, sampler = distributions()
    ids = sampler.topk(count, -1).indices
    p, q = logits.detach().softmax(-1), sampler.exp()
    rest = lambda x: 1 - x.gather(1, ids).sum(1, keepdim=True)
    model = (p * rest(q) / rest(p)).scatter(1, ids, q.gather(1, ids))
    torch.testing.assert_close(model.sum(1), torch.ones(len(model), dtype=torch.float64))
    expected = expected_score(logits, model.log(), name)
    torch.testing.assert_close(found_score(logits, sampler, ids, name), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_have_no_drift(dtype: torch.dtype) -> None:
    logits, _ = distributions()
    log_p = logits.detach().log_softmax(-1).to(dtype)
    for count in (1, 4):
        ids = log_p.topk(count, -1).indices
        coefs = centering(log_p.gather(1, ids), log_p.gather(1, ids), weigh_by("tis"))
        assert coefs.abs().max() < 8 * torch.finfo(dtype).eps
    logits, sampler = logits.to(dtype), log_p
    everything = torch.arange(V).expand(len(log_p), V)
    assert found_score(logits, sampler, everything, "none").abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["none", "tis", "icepop"])
@pytest.mark.parametrize(("count", "recorded"), [(3, 4), (6, 6), (3, 6), (2, 3)])
def test_a_nucleus(name: str, count: int, recorded: int) -> None:
    """The sampler drops all but its six most likely tokens. Of those, the policy is normalised over the
    recorded ones, and all have their probability in the sampler together; the others do not learn."""
    logits, sampler = distributions()
    order = sampler.argsort(-1, descending=True)
    truncated = sampler.scatter(1, order[:, 6:], -torch.inf).log_softmax(-1)
    nucleus, log_mass = order[:, :recorded], truncated.gather(1, order[:, :recorded]).logsumexp(1)
    log_p = logits.gather(1, nucleus).log_softmax(-1) + log_mass[:, None]
    log_q, ids = truncated.gather(1, nucleus), torch.arange(count).expand(len(logits), count)
    coefs = centering(
        log_p.detach().gather(1, ids),
        log_q.gather(1, ids),
        weigh_by(name),
        log_mass if recorded < 6 else None,
    )
    (found,) = torch.autograd.grad((coefs * log_p.gather(1, ids)).sum(), logits, retain_graph=True)
    p, q = log_p.detach().exp(), log_q.exp()
    rest = lambda x: x[:, count:].sum(1, keepdim=True)
    if count < recorded:
        q = torch.cat([q[:, :count], p[:, count:] * rest(q) / rest(p)], 1)
    masses = q * WEIGHTS[name](p / q)
    (expected,) = torch.autograd.grad((masses * log_p).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # of an empty rest: SMALLEST
    assert expected.abs().max() > 0.01


def test_tokens_that_were_dropped_and_extreme_ratios_are_finite() -> None:
    """A dropped token has q = 0 and, normalised over the others, p = 2e-35."""
    p = torch.tensor([[-0.5, -80.0], [0.0, -70.0], [-60.0, -70.0]])
    q = torch.tensor([[-0.4, -torch.inf], [-70.0, -80.0], [0.0, -torch.inf]])
    for name in WEIGHTS:
        coefs = centering(p, q, weigh_by(name))
        assert coefs.isfinite().all(), name
        assert coefs[0, 1].abs() < 1e-30
