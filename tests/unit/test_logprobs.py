import pytest
import torch

from openrlhf.algos import logprobs
from openrlhf.algos.logprobs import linear_log_probs, linear_logits

A, H, V = 11, 5, 17


def naive(hidden, weight, targets, scale=1.0, bias=None, softcap=None):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_log_probs = torch.log_softmax(logits * scale, dim=-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return all_log_probs.gather(-1, targets[:, None])[:, 0], entropy


def inputs(dtype=torch.float64, num_actions=A):
    torch.manual_seed(0)
    hidden = torch.randn(num_actions, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, V, (num_actions,))


@pytest.mark.parametrize("chunk", [1, 4, A, 100, None])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 1 / 0.7}, {"softcap": 2.0}, {"softcap": 3.0, "scale": 2.0}]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients(chunk, options, has_bias):
    """Against the plain computation, with different weights on the log-probs and entropies of all actions."""
    results = []
    for compute in (naive, linear_log_probs):
        hidden, weight, bias, targets = inputs()
        options = options | {"bias": bias if has_bias else None}
        extra = {} if compute is naive else {"with_entropy": True, "chunk": chunk}
        log_probs, entropy = compute(hidden, weight, targets, **options, **extra)
        mix = torch.arange(1.0, A + 1, dtype=torch.float64)
        (log_probs * mix + entropy * mix.flip(0)).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad, *([bias.grad] if has_bias else [])))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_gradient_of_one_output_only(which):
    results = []
    for compute in (naive, lambda *x: linear_log_probs(*x, with_entropy=True, chunk=3)):
        hidden, weight, _, targets = inputs()
        log_probs, entropy = compute(hidden, weight, targets)
        (log_probs if which == "log_probs" else entropy).pow(2).sum().backward()
        results.append((hidden.grad, weight.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def test_float32():
    results = []
    for compute in (naive, lambda *x: linear_log_probs(*x, chunk=3)):
        hidden, weight, _, targets = inputs(torch.float32)
        log_probs, _ = compute(hidden, weight, targets)
        log_probs.mean().backward()
        results.append((log_probs, hidden.grad, weight.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_bfloat16_weights_have_float32_logits():
    hidden, weight, _, targets = inputs(torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    log_probs, _ = linear_log_probs(*half, targets, chunk=4)
    exact, _ = naive(half[0].double(), half[1].double(), targets)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), exact, atol=1e-5, rtol=0)
    log_probs.sum().backward()
    exact_grads = torch.autograd.grad(exact.sum(), half)
    for x, expected in zip(half, exact_grads, strict=True):
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad, expected, atol=0.05, rtol=0.02)


def test_frozen_weight():
    hidden, weight, _, targets = inputs()
    weight.requires_grad_(False)
    linear_log_probs(hidden, weight, targets)[0].sum().backward()
    (expected,) = torch.autograd.grad(naive(hidden, weight, targets)[0].sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


@pytest.mark.parametrize("with_entropy", [False, True])
def test_without_actions_zeros_still_flow(with_entropy):
    hidden, weight, bias, targets = inputs(num_actions=0)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, bias=bias, with_entropy=with_entropy)
    assert log_probs.shape == (0,)
    loss = log_probs.sum() + (entropy.sum() if with_entropy else 0)
    loss.backward()
    assert hidden.grad.shape == (0, H)
    assert torch.equal(weight.grad, torch.zeros(V, H, dtype=weight.dtype))
    assert torch.equal(bias.grad, torch.zeros(V, dtype=bias.dtype))


def test_weight_is_read_again_in_the_backward_pass():
    """Under ZeRO-3 the data of a parameter is released after the forward pass and gathered anew."""
    hidden, weight, _, targets = inputs()
    expected = torch.autograd.grad(naive(hidden, weight, targets)[0].sum(), hidden)[0]
    full = weight.data.clone()
    log_probs, _ = linear_log_probs(hidden, weight, targets)
    weight.data = torch.empty(0, dtype=weight.dtype)
    weight.data = full
    log_probs.sum().backward()
    torch.testing.assert_close(hidden.grad, expected)


def test_never_holds_more_than_a_chunk_of_logits(monkeypatch):
    rows = []
    original = logprobs.HeadLogits.__call__

    def record(self, hidden):
        rows.append(len(hidden))
        return original(self, hidden)

    monkeypatch.setattr(logprobs.HeadLogits, "__call__", record)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * V * 4)  # four rows of float32 logits
    hidden, weight, _, targets = inputs()
    linear_log_probs(hidden, weight, targets)[0].sum().backward()
    assert rows == [4, 4, 3] * 2


def test_keeps_nothing_of_the_size_of_the_logits():
    hidden, weight, _, targets = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_log_probs(hidden, weight, targets, with_entropy=True)
    assert max(saved) == A * H


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_and_their_gradients(has_bias):
    hidden, weight, bias, _ = inputs()
    arguments = (hidden, weight, bias) if has_bias else (hidden, weight)
    torch.testing.assert_close(linear_logits(*arguments), torch.nn.functional.linear(*arguments))
    assert torch.autograd.gradcheck(linear_logits, arguments)


def test_logits_of_half_precision_weights_are_not_rounded():
    """A float32 sum of H products is off by H 2^-24 of what it adds up at most; rounding to bf16 by 2^-9."""
    hidden, weight, bias, _ = (x.detach() for x in inputs(torch.bfloat16))
    logits = linear_logits(hidden, weight, bias)
    assert logits.dtype == torch.float32
    exact = hidden.double() @ weight.double().t() + bias.double()
    size = hidden.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((logits.double() - exact).abs() <= size * (H + 1) * 2**-24).all()
    assert not torch.equal(exact, exact.bfloat16().double())
