import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from architectures import tiny_config, tiny_model
from torch import Tensor

from openrlhf.algorithms import logprobs
from openrlhf.algorithms.distillation import Divergence, LinearHead, linear_divergence
from openrlhf.models.policy import transformed_logits
from openrlhf.models.student import linear_head

A, H, TEACHER_H, V = 7, 4, 5, 9
KINDS = get_args(Divergence)
OPTIONS = [{}, {"scale": 1 / 0.7}, {"softcap": 2.0}, {"softcap": 3.0, "scale": 2.0}]


def materialised(hidden, head: LinearHead, size: int) -> Tensor:
    """Returns the (A, V) log-probs over the first `size` tokens, from whole logits."""
    logits = hidden @ head.weight[:size].t()
    if head.bias is not None:
        logits = logits + head.bias[:size]
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits * head.scale).log_softmax(-1)


def naive(hidden, head: LinearHead, teacher_hidden, teacher_head: LinearHead, *, kind: Divergence) -> Tensor:
    size = min(len(head.weight), len(teacher_head.weight))
    s, t = materialised(hidden, head, size), materialised(teacher_hidden, teacher_head, size)
    if kind == "forward_kl":
        return F.kl_div(s, t, log_target=True, reduction="none").sum(-1)
    return F.kl_div(t, s, log_target=True, reduction="none").sum(-1)


def noise(*shape, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def teacher_of(size: int, has_bias: bool, **options) -> tuple[Tensor, LinearHead]:
    bias = noise(size, seed=12) if has_bias else None
    return noise(A, TEACHER_H, seed=10), LinearHead(noise(size, TEACHER_H, seed=11), bias, **options)


def student_of(size: int) -> tuple[Tensor, Tensor, Tensor]:
    made = noise(A, H, seed=0), noise(size, H, seed=1), noise(size, seed=2)
    for tensor in made:
        tensor.requires_grad_()
    return made


def logits_as_hidden(*rows: list[float]) -> tuple[Tensor, LinearHead]:
    """Returns hidden states that are the logarithms of these probabilities, and a head that is the
    identity."""
    hidden = torch.tensor(rows, dtype=torch.float64).log()
    return hidden, LinearHead(torch.eye(hidden.shape[1], dtype=torch.float64))


def test_divergences_by_hand():
    student, head = logits_as_hidden([0.5, 0.5], [0.1, 0.9])
    teacher, teacher_head = logits_as_hidden([0.25, 0.75], [0.1, 0.9])
    forward = linear_divergence(student, head, teacher, teacher_head, kind="forward_kl")
    reverse = linear_divergence(student, head, teacher, teacher_head, kind="reverse_kl")
    assert forward.tolist() == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0])
    assert reverse.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0])


def test_slopes_by_hand():
    """The gradients are those that the docstring states, at student (1/2, 1/2) and teacher (1/4, 3/4)."""
    teacher, teacher_head = logits_as_hidden([0.25, 0.75])
    found = {}
    for kind in KINDS:
        student, head = logits_as_hidden([0.5, 0.5])
        student.requires_grad_()
        linear_divergence(student, head, teacher, teacher_head, kind=kind).sum().backward()
        found[kind] = student.grad[0].tolist()
    assert found["forward_kl"] == pytest.approx([0.25, -0.25])
    # 1/2 (log 2 - KL), 1/2 (log 2/3 - KL) with KL = (log 2 + log 2/3) / 2
    assert found["reverse_kl"] == pytest.approx([math.log(3) / 4, -math.log(3) / 4])


@pytest.fixture(params=KINDS)
def kind(request) -> Divergence:
    return request.param


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, A, None])
@pytest.mark.parametrize(("size", "teacher_size"), [(V, V), (V, V - 2), (V - 2, V)])
@pytest.mark.few(48)
def test_equals_kl_div_on_whole_logits(kind, options, has_bias, chunk, size, teacher_size):
    """Values agree, and gradients with another weight on each action; padded ends of vocabularies count in
    neither."""
    teacher_hidden, teacher_head = teacher_of(teacher_size, has_bias, scale=0.8, softcap=4.0)
    weights = torch.arange(1.0, A + 1, dtype=torch.float64)
    results = []
    for compute in (naive, linear_divergence):
        hidden, weight, bias = student_of(size)
        head = LinearHead(weight, bias if has_bias else None, **options)
        extra = {} if compute is naive else {"chunk": chunk}
        found = compute(hidden, head, teacher_hidden, teacher_head, kind=kind, **extra)
        (found * weights).sum().backward()
        results.append((found, hidden.grad, weight.grad, *([bias.grad] if has_bias else [])))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("size", "teacher_size"), [(V, V), (V, V - 2), (V - 2, V)])
@pytest.mark.few(8)
def test_gradcheck(kind, options, size, teacher_size):
    teacher_hidden, teacher_head = teacher_of(teacher_size, has_bias=True)

    def divergence(hidden, weight, bias):
        head = LinearHead(weight, bias, **options)
        return linear_divergence(hidden, head, teacher_hidden, teacher_head, kind=kind, chunk=3)

    assert torch.autograd.gradcheck(divergence, student_of(size))


def test_logits_far_apart_stay_finite(kind):
    student = torch.tensor([[1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1e4], [1e4, 0.0]])
    head = LinearHead(torch.eye(2))
    divergence = linear_divergence(student, head, teacher, head, kind=kind)
    divergence.sum().backward()
    # two certain distributions that contradict each other; an even and a certain one
    assert divergence.tolist() == pytest.approx(
        [1e4, math.log(2) if kind == "forward_kl" else 5e3 - math.log(2)]
    )
    assert student.grad.isfinite().all()


def test_no_divergence_from_itself(kind):
    hidden, weight, bias = student_of(V)
    own = LinearHead(weight, bias, scale=0.7, softcap=2.0)
    frozen = LinearHead(weight.detach(), bias.detach(), scale=0.7, softcap=2.0)
    divergence = linear_divergence(hidden, own, hidden.detach(), frozen, kind=kind)
    divergence.sum().backward()
    torch.testing.assert_close(divergence, torch.zeros_like(divergence), atol=1e-12, rtol=0)
    for gradient in (hidden.grad, weight.grad, bias.grad):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_a_frozen_student_head_gets_no_gradient(kind):
    hidden, weight, _ = student_of(V)
    teacher_hidden, teacher_head = teacher_of(V, has_bias=False)
    head = LinearHead(weight.detach())
    linear_divergence(hidden, head, teacher_hidden, teacher_head, kind=kind).sum().backward()
    expected = naive(hidden, LinearHead(weight.detach()), teacher_hidden, teacher_head, kind=kind).sum()
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0])
    assert weight.grad is None


def test_bfloat16_models_are_compared_in_float32(kind):
    hidden, weight, _ = (x.detach().bfloat16().requires_grad_() for x in student_of(V))
    teacher_hidden, teacher_head = teacher_of(V, has_bias=False)
    teacher_hidden, teacher_head = teacher_hidden.bfloat16(), LinearHead(teacher_head.weight.bfloat16())
    found = linear_divergence(hidden, LinearHead(weight), teacher_hidden, teacher_head, kind=kind)
    exact = naive(
        hidden.double(),
        LinearHead(weight.double()),
        teacher_hidden.double(),
        LinearHead(teacher_head.weight.double()),
        kind=kind,
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    for x, expected in zip((hidden, weight), torch.autograd.grad(exact.sum(), (hidden, weight)), strict=True):
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad, expected, atol=0.05, rtol=0.02)


def test_without_actions_zeros_still_flow(kind):
    _, weight, bias = student_of(V)
    hidden = torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    _, teacher_head = teacher_of(V, has_bias=False)
    teacher_hidden = torch.zeros(0, TEACHER_H, dtype=torch.float64)
    divergence = linear_divergence(hidden, LinearHead(weight, bias), teacher_hidden, teacher_head, kind=kind)
    divergence.sum().backward()
    assert divergence.shape == (0,)
    assert hidden.grad.shape == (0, H)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_never_holds_more_than_a_chunk_of_logits(kind, monkeypatch):
    rows = []
    original = logprobs.HeadLogits.__call__

    def record(self, hidden):
        rows.append(len(hidden))
        return original(self, hidden)

    monkeypatch.setattr(logprobs.HeadLogits, "__call__", record)
    hidden, weight, _ = student_of(V)
    teacher_hidden, teacher_head = teacher_of(V, has_bias=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        saved: list[int] = []
        found = linear_divergence(
            hidden, LinearHead(weight), teacher_hidden, teacher_head, kind=kind, chunk=3
        )
    found.sum().backward()
    assert rows == [3, 3, 3, 3, 1, 1] * 2  # student and teacher in turn, forward and again backward
    assert max(saved) == A * TEACHER_H


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3"])
def test_the_head_of_a_model_has_its_softcap(architecture: str) -> None:
    model = tiny_model(tiny_config(architecture))
    hidden = torch.randn(3, model.config.hidden_size)
    head = linear_head(model)
    logits = head.scale * (hidden @ head.weight.T)
    cap = getattr(model.config, "final_logit_softcapping", None)
    assert head.softcap == cap and (cap is not None) == (architecture == "gemma2")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    assert torch.equal(transformed_logits(model.get_output_embeddings()(hidden), model.config), logits)
