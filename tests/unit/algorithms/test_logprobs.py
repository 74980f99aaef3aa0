import weakref
from types import SimpleNamespace

import pytest
import torch
from counted_work import Work
from torch.utils._python_dispatch import TorchDispatchMode

from openrlhf.algorithms import logprobs
from openrlhf.algorithms.logprobs import linear_log_probs, linear_logits, rows_of_chunk, sum_of_log_probs
from openrlhf.tools.reference.outputs import chosen, distribution, entropies

A, H, V = 11, 5, 17


def naive(hidden, weight, targets, scale=1.0, bias=None, softcap=None):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    of_all = distribution(logits * scale)
    return chosen(of_all, targets), entropies(of_all)


def inputs(dtype=torch.float64, num_actions=A):
    torch.manual_seed(0)
    hidden = torch.randn(num_actions, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, V, (num_actions,))


def assert_equal(results, tolerance=1e-9):
    """Compares what two ways of computing have found."""
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunk", [1, 4, A, 100, None])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 1 / 0.7}, {"softcap": 2.0}, {"softcap": 3.0, "scale": 2.0}]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients(chunk, options, has_bias):
    """Values and gradients equal the plain computation, with different weights on the log-probs and entropies
    of all actions."""
    results = []
    for compute in (naive, linear_log_probs):
        hidden, weight, bias, targets = inputs()
        options = options | {"bias": bias if has_bias else None}
        extra = {} if compute is naive else {"with_entropy": True, "chunk": chunk}
        log_probs, entropy = compute(hidden, weight, targets, **options, **extra)
        mix = torch.arange(1.0, A + 1, dtype=torch.float64)
        (log_probs * mix + entropy * mix.flip(0)).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad, *([bias.grad] if has_bias else [])))
    assert_equal(results)


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("head_learns", [True, False])
@pytest.mark.parametrize("scale", [2.0, torch.linspace(0.5, 2, A, dtype=torch.float64)], ids=["one", "each"])
def test_several_targets_of_an_action(chunk, head_learns, scale):
    """Also with one token twice, and with a gradient for some of them only."""
    results = []
    for is_plain in (True, False):
        hidden, weight, bias, targets = inputs()
        weight.requires_grad_(head_learns), bias.requires_grad_(head_learns)
        targets = torch.stack([targets, targets.flip(0), targets], 1)
        if is_plain:
            logits = 3.0 * torch.tanh((hidden @ weight.t() + bias) / 3.0)
            log_probs = distribution(logits * torch.as_tensor(scale).view(-1, 1)).gather(1, targets)
        else:
            options = {"scale": scale, "bias": bias, "softcap": 3.0, "chunk": chunk}
            log_probs, _ = linear_log_probs(hidden, weight, targets, **options)
        mix = torch.arange(3.0 * A, dtype=torch.float64).view(A, 3).masked_fill(targets == targets[0], 0)
        (log_probs * mix).sum().backward()
        results.append([log_probs, hidden.grad, *([weight.grad, bias.grad] if head_learns else [])])
    assert_equal(results)
    hidden, weight, _, targets = inputs(num_actions=0)
    nothing, _ = linear_log_probs(hidden, weight, targets[:, None].expand(0, 4))
    assert nothing.shape == (0, 4)
    nothing.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_gradient_of_one_output_only(which):
    results = []
    for compute in (naive, lambda *x: linear_log_probs(*x, with_entropy=True, chunk=3)):
        hidden, weight, _, targets = inputs()
        log_probs, entropy = compute(hidden, weight, targets)
        (log_probs if which == "log_probs" else entropy).pow(2).sum().backward()
        results.append((hidden.grad, weight.grad))
    assert_equal(results)


def test_float32():
    results = []
    for compute in (naive, lambda *x: linear_log_probs(*x, chunk=3)):
        hidden, weight, _, targets = inputs(torch.float32)
        log_probs, _ = compute(hidden, weight, targets)
        log_probs.mean().backward()
        results.append((log_probs, hidden.grad, weight.grad))
    assert_equal(results, tolerance=1e-6)


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


OPTIONS = [{}, {"scale": 1 / 0.7}, {"softcap": 2.0, "scale": 2.0}]


@pytest.mark.parametrize("options", OPTIONS)
def test_frozen_head(options):
    """An action's gradient is its own share of the loss, whenever it is computed."""
    hidden, weight, bias, targets = inputs()
    weight.requires_grad_(False), bias.requires_grad_(False)
    mix = torch.arange(1.0, A + 1, dtype=torch.float64)
    log_probs, _ = linear_log_probs(hidden, weight, targets, bias=bias, chunk=4, **options)
    (log_probs * mix).sum().backward()
    exact, _ = naive(hidden, weight, targets, bias=bias, **options)
    torch.testing.assert_close(log_probs, exact)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad((exact * mix).sum(), hidden)[0])
    assert weight.grad is None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1, 2)])
def test_sum_and_its_gradients(options, has_bias, frozen):
    results = []
    for compute in (
        lambda *x, **y: naive(*x, **y)[0].sum(),
        lambda *x, **y: sum_of_log_probs(*x, chunk=4, **y),
    ):
        *learned, targets = inputs()
        for i in frozen:
            learned[i].requires_grad_(False)
        hidden, weight, bias = learned
        total = compute(hidden, weight, targets, bias=bias if has_bias else None, **options)
        if total.requires_grad:
            (-total / 7).backward()
        results.append([total, *(x.grad for x in learned)])
    assert_equal(results)


def test_sum_without_gradients():
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        total = sum_of_log_probs(hidden, weight, targets)
    torch.testing.assert_close(total, naive(hidden, weight, targets)[0].sum().detach())


def test_sum_of_no_log_probs():
    hidden, weight, _, targets = inputs(num_actions=0)
    sum_of_log_probs(hidden, weight, targets).backward()
    assert hidden.grad.shape == (0, H)
    assert torch.equal(weight.grad, torch.zeros(V, H, dtype=weight.dtype))


def test_gradients_made_in_the_forward_pass_are_used_once():
    """Gradients are scaled in place, so a second backward pass would be wrong."""
    hidden, weight, _, targets = inputs()
    total = sum_of_log_probs(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        total.backward()


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


def test_sum_keeps_nothing_of_the_head():
    """ZeRO-3 frees its storage between the passes; a reference to it would keep it."""
    hidden, weight, bias, targets = inputs()
    expected = torch.autograd.grad(naive(hidden, weight, targets, bias=bias)[0].sum(), (hidden, weight))
    total, freed = sum_of_log_probs(hidden, weight, targets, bias=bias), []
    weakref.finalize(weight.untyped_storage(), lambda: freed.append(True))
    full = weight.data.clone()
    weight.data = torch.empty(0, dtype=weight.dtype)
    assert freed
    weight.data = full
    total.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), expected)


def test_never_holds_more_than_a_chunk_of_logits(monkeypatch):
    rows = []
    original = logprobs.HeadLogits.__call__

    def record(self, hidden, *of_all):
        rows.append(len(hidden))
        return original(self, hidden, *of_all)

    monkeypatch.setattr(logprobs.HeadLogits, "__call__", record)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * V * 4)  # four rows of float32 logits
    hidden, weight, _, targets = inputs()
    linear_log_probs(hidden, weight, targets)[0].sum().backward()
    assert rows == [4, 4, 3] * 2
    sum_of_log_probs(hidden, weight, targets).backward()
    assert rows == [4, 4, 3] * 3


def test_chunks_on_a_gpu_take_a_share_of_its_memory(monkeypatch):
    head = type("Head", (), {"is_cuda": True, "device": "cuda:0", "__len__": lambda self: 151_936})()
    for gigabytes, rows in ((80, 80 * 2**30 // 64 // 4 // 151_936), (8, 2**28 // 4 // 151_936)):
        memory = SimpleNamespace(total_memory=gigabytes * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, memory=memory: memory)
        assert rows_of_chunk(head) == rows
        assert rows_of_chunk(head, copies=2) == rows // 2


@pytest.mark.parametrize(
    ("softcap", "with_entropy", "copies"),
    [(None, False, 1), (2.0, False, 2), (None, True, 2), (2.0, True, 3)],
)
def test_memory_is_that_of_a_chunk(softcap, with_entropy, copies):
    """The memory is that of logits, beside hidden states and the gradients, which are a twentieth of a chunk
    here."""
    actions, vocabulary, size, chunk = 256, 2000, 2, 64
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, size, requires_grad=True) for n in (actions, vocabulary))
    targets = torch.randint(0, vocabulary, (actions,))
    with Work() as work:
        log_probs, entropy = linear_log_probs(
            hidden, weight, targets, softcap=softcap, with_entropy=with_entropy, chunk=chunk
        )
        (log_probs.sum() + (entropy.sum() if with_entropy else 0)).backward()
    assert copies <= work.peak / (4 * chunk * vocabulary) < copies + 0.2
    if not with_entropy:
        with Work() as work:
            sum_of_log_probs(hidden, weight, targets, softcap=softcap, chunk=chunk).backward()
        assert copies <= work.peak / (4 * chunk * vocabulary) < copies + 0.2


def test_products_of_the_head():
    """There are four: the forward pass, recomputed logits, and the gradients of both factors; one less where
    the gradients are made of the logits that are there."""
    found = {}
    for name, frozen in (("log_probs", False), ("log_probs", True), ("sum", False)):
        hidden, weight, _, targets = inputs()
        weight.requires_grad_(not frozen)
        with Work(A * H * V) as work:
            if name == "sum":
                sum_of_log_probs(hidden, weight, targets, chunk=4).backward()
            else:
                linear_log_probs(hidden, weight, targets, chunk=4)[0].sum().backward()
        found[name, frozen] = round(work.products, 9)
    assert found == {("log_probs", False): 4, ("log_probs", True): 2, ("sum", False): 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_of_a_gpu(dtype):
    """The meta device applies the rules of torch's CUDA operators: logits and the gradient of the head are
    float32, and no half-precision product of the head's size is made on the way."""
    hidden = torch.empty(A, 16, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(V, 16, dtype=dtype, device="meta", requires_grad=True)
    targets = torch.empty(A, dtype=torch.int64, device="meta")
    ops = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                ops.append((func._overloadname, tuple(result.shape), result.dtype))
            return result

    with Record():
        log_probs, entropy = linear_log_probs(hidden, weight, targets, with_entropy=True, softcap=2.0)
        (log_probs.sum() + entropy.sum()).backward()
        sum_of_log_probs(hidden, weight, targets).backward()
        linear_logits(hidden, weight).sum().backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert weight.grad.dtype == hidden.grad.dtype == dtype
    logits = ("dtype", (A, V), torch.float32)
    of_hidden, of_weight = ("default", (A, 16), dtype), ("dtype_out", (V, 16), torch.float32)
    assert ops[:-2] == [logits, logits, of_hidden, of_weight, logits, of_hidden, of_weight, logits]


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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("head_learns", [True, False])
def test_each_action_may_have_a_scale_of_its_own(softcap, head_learns):
    """Log-probs, entropies and gradients are those of each action alone."""
    scales = torch.tensor([0.5, 2.0, 1.0] * 4, dtype=torch.float64)[:A]
    results = []
    for parts in ([slice(0, A)], [slice(i, i + 1) for i in range(A)]):
        hidden, weight, bias, targets = inputs()
        weight.requires_grad_(head_learns)
        bias.requires_grad_(head_learns)
        total, found = 0.0, []
        for part in parts:
            scale = scales if len(parts) == 1 else scales[part].item()
            options = {"scale": scale, "bias": bias, "softcap": softcap, "with_entropy": head_learns}
            log_probs, entropy = linear_log_probs(hidden[part], weight, targets[part], chunk=4, **options)
            mix = torch.arange(1.0, A + 1, dtype=torch.float64)[part]
            total = total + (mix * log_probs).sum() + (0 if entropy is None else (entropy / mix).sum())
            found.append(log_probs)
        total.backward()
        results.append((torch.cat(found), hidden.grad, *([weight.grad, bias.grad] if head_learns else [])))
    assert_equal(results)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_scale_for_each_action_is_that_of_all_bit_for_bit(softcap):
    results = []
    for scale in (1 / 0.7, 1 / torch.full((A,), 0.7, dtype=torch.float64)):
        hidden, weight, _, targets = inputs(torch.float32)
        options = {"softcap": softcap, "with_entropy": True, "chunk": 3}
        log_probs, entropy = linear_log_probs(hidden, weight, targets, scale=scale, **options)
        (log_probs + entropy).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
