"""Ranks that share a model's matrices compute what one rank computes with all of them.

The ranks are threads. Everything is float64, except norms, heads of judges and scores of attention that are
computed one by one, which are float32 in every model.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from architectures import ALL, tiny_config
from refusals import refused
from test_policy import SHAPE
from test_sequence_parallel import NORM, OBJECTIVES, PPO, ROUNDING, experiences, language_model, scorer
from torch import Tensor

from openrlhf.algorithms.logprobs import (
    WHOLE,
    SharedVocabulary,
    Vocabulary,
    linear_log_probs,
    sum_of_log_probs,
)
from openrlhf.errors import ErrorCode
from openrlhf.models import tensor_parallel
from openrlhf.models.attention import CannotPack
from openrlhf.models.backbone import RowModel
from openrlhf.models.dropout import enable_checkpointing
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ValueModel
from openrlhf.models.self_check import read_one_by_one, resolve_row_layout, shard_matrices_checked
from openrlhf.models.tensor_parallel import (
    check_tensor_parallel,
    put_together,
    shard_matrices,
    whole,
    whole_shape,
    why_not,
)

EVEN = SHAPE | {"vocab_size": 64, "num_key_value_heads": 4}
"""Sizes that divide among four ranks."""
QWEN = hf.Qwen3Config(**EVEN, tie_word_embeddings=True)
LLAMA = hf.LlamaConfig(**EVEN, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def passed(module: RowModel, row: Any, objective_of: Callable) -> tuple[dict, dict]:
    """Returns (metrics, gradients in full) of two rows, the second one without actions."""
    objective, metrics = objective_of(module), {}
    for part in (row, row.empty()):
        loss, found = objective(module, part, NORM)
        loss.backward()
        metrics = {name: metrics.get(name, 0) + x.detach() for name, x in found.items()}
    return metrics, {n: in_full(p) for n, p in module.named_parameters() if p.grad is not None}


def in_full(p: torch.nn.Parameter) -> Tensor:
    """Returns the full gradient of a parameter that ranks share."""
    grad = copy.copy(p.grad)
    if hasattr(p, "shard"):
        grad.shard = p.shard
    return whole(grad)


def on_ranks(threads: Callable, module: RowModel, row: Any, objective_of: Callable, num_ranks: int) -> list:
    def part() -> Any:
        own = copy.deepcopy(module)
        shard_matrices(own.model, group())
        return passed(own, row, objective_of)

    return threads(num_ranks, part)


def check_equal(found: list, expected: tuple) -> None:
    largest = max(float(g.nan_to_num().abs().max()) for g in expected[1].values())
    assert largest > 1e-2
    close = {"atol": ROUNDING * max(1, largest), "rtol": 0, "equal_nan": True}  # a random Gemma 3n has NaN
    for metrics, gradients in found:
        torch.testing.assert_close(metrics, expected[0], atol=ROUNDING, rtol=0, check_dtype=False)
        torch.testing.assert_close(gradients, expected[1], **close)


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "balance"])
def test_every_objective(threads: Callable, name: str) -> None:
    """The vocabulary has 61 tokens, which do not divide."""
    build, row, objective_of = OBJECTIVES[name]
    module, row = build(), row()
    expected = passed(copy.deepcopy(module), row, objective_of)
    check_equal(on_ranks(threads, module, row, objective_of, 2), expected)


BUILT = {
    "qwen3, tied": lambda: PolicyModel(language_model(QWEN)),
    "llama, untied, biases": lambda: PolicyModel(language_model(LLAMA)),
    "critic": lambda: ValueModel(scorer(QWEN)),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", BUILT)
def test_gradients_with_a_shared_vocabulary(threads: Callable, name: str, num_ranks: int) -> None:
    module = BUILT[name]()
    objective_of = OBJECTIVES["critic" if name == "critic" else "ppo"][2]
    expected = passed(copy.deepcopy(module), experiences(), objective_of)
    check_equal(on_ranks(threads, module, experiences(), objective_of, num_ranks), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again(threads: Callable, reentrant: bool) -> None:
    module = BUILT["qwen3, tied"]()
    expected = passed(copy.deepcopy(module), experiences(), lambda m: PPO)
    enable_checkpointing(module.model, reentrant=reentrant, dropout=True)
    module.train()
    check_equal(on_ranks(threads, module, experiences(), lambda m: PPO, 2), expected)


def test_layers_with_the_same_input_sum_its_gradients_once(threads, monkeypatch):
    """In a layer there are two sums forward, after attention and MLP, and two backward, before them."""
    module, row = BUILT["qwen3, tied"](), experiences().row
    of_states: list[int] = []
    own = tensor_parallel.summed

    def counted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        of_states.extend([group.rank()] * (x.dim() == 3))
        return own(x, group)

    monkeypatch.setattr(tensor_parallel, "summed", counted)

    def part() -> tuple[int, int]:
        shared = copy.deepcopy(module)
        shard_matrices(shared.model, group())
        loss = shared(row).log_probs.sum()
        forward = of_states.count(group().rank())
        dist.barrier()
        loss.backward()
        return forward, of_states.count(group().rank()) - forward

    layers = QWEN.num_hidden_layers
    assert threads(2, part) == [(1 + 2 * layers, 2 * layers)] * 2


FAST = ("gemma2", "phi3", "qwen3_5_text")
"""Architectures with capped scores; with fused matrices, whose outputs are gathered; with linear
attention."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ALL])
def test_every_architecture_is_right_or_refused(threads: Callable, name: str) -> None:
    config = tiny_config(name)
    with torch.device("meta"):
        if why_not(hf.AutoModelForCausalLM.from_config(config), 2):
            return
    for key in {"vocab_size", "vocab_size_per_layer_input"} & config.to_dict().keys():
        setattr(config, key, 62)
    module, row = readable(config), experiences()
    expected = passed(copy.deepcopy(module), row, lambda m: PPO)
    check_equal(on_ranks(threads, module, row, lambda m: PPO, 2), expected)
    assert shared_rightly(threads, module.to(torch.bfloat16)) == ["", ""]  # a loaded model passes the check


def readable(config: hf.PreTrainedConfig) -> PolicyModel:
    try:
        module = PolicyModel(language_model(config))
        module(experiences().row)
    except (CannotPack, ValueError):
        module = PolicyModel(language_model(config, attention="eager"))
        read_one_by_one(module.model)
    return module


def test_the_check_of_a_loaded_model(threads: Callable) -> None:
    """The check covers the logits, of which each rank has some."""

    def resolved() -> bool:
        module = PolicyModel(language_model(QWEN).float())
        shard_matrices(module.model, group())
        return resolve_row_layout(lambda: module(), module).packed

    assert threads(2, resolved) == [True, True]


SINGLE = {
    "qwen3, tied": lambda: PolicyModel(language_model(QWEN)),
    "llama, untied, biases": lambda: PolicyModel(language_model(LLAMA)),
    "critic": lambda: ValueModel(scorer(QWEN)),
    "whole vocabulary": lambda: PolicyModel(language_model(hf.Qwen3Config(**EVEN | {"vocab_size": 61}))),
}


def shared_rightly(threads: Callable, module: RowModel, **plan: str | None) -> list[str]:
    """Returns the message of the check on each of two ranks. `plan`: other styles of some layers."""

    def told() -> str:
        model = copy.deepcopy(module).model
        own = {name: plan.get(name.rpartition(".")[2], style) for name, style in model._tp_plan.items()}
        model._tp_plan = {name: style for name, style in own.items() if style}
        before = {name: (p.dtype, p.device) for name, p in model.named_parameters()}
        try:
            shard_matrices_checked(model, group())
        except ValueError as error:
            return str(error)
        assert before == {name: (p.dtype, p.device) for name, p in model.named_parameters()}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return ""

    return threads(2, told)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_plan_passes(threads: Callable, name: str, dtype: torch.dtype) -> None:
    """A right plan passes in half precision too: the check computes in float32."""
    assert shared_rightly(threads, SINGLE[name]().to(dtype)) == ["", ""]


WRONG = "plan for its architecture is wrong"
REFUSED = "--ds.tensor_parallel_size 2: "


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"o_proj": "colwise"}, "RuntimeError"),
        ({"down_proj": None}, "RuntimeError"),
        ({"o_proj": "rowwise_split_input"}, "RuntimeError"),
        ({"down_proj": "no sum"}, "hidden states"),
        ({"o_proj": "no sum"}, "hidden states"),
    ],
    ids=str,
)
def test_a_wrong_plan_is_refused(threads, monkeypatch, plan, reason):
    """A wrong plan is refused even where each rank computes something of the right shape."""
    no_sum = partial(tensor_parallel._shard_rows, kind=type("NoSum", (torch.nn.Linear,), {}))
    monkeypatch.setitem(tensor_parallel.STYLES, "no sum", no_sum)
    for dtype in (torch.float32, torch.bfloat16):
        for said in shared_rightly(threads, BUILT["qwen3, tied"]().to(dtype), **plan):
            assert said.startswith(REFUSED) and reason in said and WRONG in said


def test_one_layer_without_its_sum_shows(threads: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is the last layer's MLP, in bfloat16."""
    own, layers = tensor_parallel._planned, QWEN.num_hidden_layers

    def planned(model: Any) -> Any:
        wrong = f"layers.{layers - 1}.mlp.down_proj"
        return [(n, module, "no sum" if n.endswith(wrong) else style) for n, module, style in own(model)]

    no_sum = partial(tensor_parallel._shard_rows, kind=type("NoSum", (torch.nn.Linear,), {}))
    monkeypatch.setitem(tensor_parallel.STYLES, "no sum", no_sum)
    monkeypatch.setattr(tensor_parallel, "_planned", planned)
    module = BUILT["qwen3, tied"]().to(torch.bfloat16)
    for said in shared_rightly(threads, module):
        assert said.startswith(REFUSED) and "hidden states" in said


def test_a_head_whose_tokens_are_mixed_up_is_refused(threads, monkeypatch):
    joined = SharedVocabulary.joined
    monkeypatch.setattr(SharedVocabulary, "joined", lambda self, x: joined(self, x).flip(-1))
    for said in shared_rightly(threads, BUILT["llama, untied, biases"]()):
        assert "logits" in said and WRONG in said


# ---- what is shared


def test_what_each_rank_keeps(threads: Callable) -> None:
    """Each of two ranks keeps halves of matrices, of biases of layers that are split by outputs, and of the
    vocabulary."""
    original = PolicyModel(language_model(LLAMA))

    def kept() -> dict[str, tuple[int, ...]]:
        module = copy.deepcopy(original)
        shard_matrices(module.model, group())
        unshared = dict(original.model.named_parameters())
        for name, p in module.model.named_parameters():
            assert torch.equal(whole(p), unshared[name]) and whole_shape(p) == unshared[name].shape
            parts = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(parts, p.detach())
            assert torch.equal(put_together(parts, p), unshared[name])
        return {name: tuple(p.shape) for name, p in module.model.named_parameters() if ".1." not in name}

    first, second = threads(2, kept)
    assert first == second
    layer = "model.layers.0"
    assert first == {
        "model.embed_tokens.weight": (32, 32),
        **{f"{layer}.self_attn.{x}_proj.weight": (16, 32) for x in "qkv"},
        **{f"{layer}.self_attn.{x}_proj.bias": (16,) for x in "qkv"},
        f"{layer}.self_attn.o_proj.weight": (32, 16),
        f"{layer}.self_attn.o_proj.bias": (32,),
        **{f"{layer}.mlp.{x}_proj.weight": (24, 32) for x in ("gate", "up")},
        **{f"{layer}.mlp.{x}_proj.bias": (24,) for x in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (32, 24),
        f"{layer}.mlp.down_proj.bias": (32,),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        "model.norm.weight": (32,),
        "lm_head.weight": (32, 32),
    }


def test_what_is_new_is_the_same_on_every_rank(threads: Callable) -> None:
    original = ValueModel(scorer(QWEN))

    def head() -> Tensor:
        module = copy.deepcopy(original)
        module.model.score.weight.data += dist.get_rank()
        shard_matrices(module.model, group())
        return module.model.score.weight.data

    assert all(torch.equal(found, original.model.score.weight) for found in threads(2, head))


def test_a_gradient_that_is_not_contiguous_is_summed(threads: Callable) -> None:
    """The gradient of hidden states that are read as a transposed matrix is such a one."""
    model, states = language_model(LLAMA), torch.randn(32, 5).double()

    def gradient() -> Tensor | None:
        module, x = copy.deepcopy(model), states.clone().requires_grad_()
        if dist.is_initialized():
            shard_matrices(module, group())
        module.model.layers[0].mlp(x.t()).square().sum().backward()
        return x.grad

    expected = gradient()
    for found in threads(2, gradient):
        torch.testing.assert_close(found, expected, atol=1e-12 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (hf.GPT2Config(n_embd=32, n_head=4), 2, "transformers has no plan for its architecture"),
        (tiny_config("apertus"), 2, "its activation has weights of its own"),
        (hf.MixtralConfig(**EVEN), 2, "transformers' plan for model.layers.0.mlp.experts is moe_tp_experts,"),
        (hf.LlamaConfig(**EVEN), 3, "its 4 attention heads"),
        (hf.LlamaConfig(**SHAPE), 4, "its 2 heads of keys"),
        (
            hf.LlamaConfig(**EVEN | {"intermediate_size": 50}),
            4,
            "its 50 features of model.layers.0.mlp.gate_proj",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_model_that_ranks_cannot_share_is_refused(config, size, reason, tmp_path):
    config.save_pretrained(tmp_path)
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.tensor_parallel_size", value=size) as refusal:
        check_tensor_parallel(str(tmp_path), "--model.model_name_or_path", size)
    assert str(tmp_path) in refusal.value.text and reason in refusal.value.text
    assert "--ds.zero_stage 3" in refusal.value.text


# ---- the head


def scores(vocabulary: Vocabulary, part: slice, **options: Any) -> dict[str, Tensor | None]:
    """Returns the log-probs of 7 actions among 12 tokens, and gradients of them and of their entropy."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    hidden, weight, bias, targets = draw(7, 5), draw(12, 5), draw(12), torch.tensor([0, 3, 4, 5, 7, 8, 11])
    towards = draw(2, 7)
    if options.pop("several", False):
        targets = torch.stack([targets, targets.flip(0), targets], 1)
    hidden.requires_grad_()
    weight, bias = weight[part].requires_grad_(options.pop("learns", True)), bias[part]
    bias.requires_grad_(weight.requires_grad)
    common = {"bias": bias, "scale": 0.7, "chunk": 3, "vocabulary": vocabulary}
    if options.pop("summed", False):
        log_probs, entropy = sum_of_log_probs(hidden, weight, targets, **common, **options), None
    else:
        log_probs, entropy = linear_log_probs(hidden, weight, targets, **common, **options)
    loss = (towards[0] * log_probs.t()).sum()
    (loss if entropy is None else loss + (towards[1] * entropy).sum()).backward()
    return {
        "log_probs": log_probs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
        "bias": bias.grad,
    }


KEPT = torch.tensor([[0, 3, 9], [3, 3, 2], [4, 5, 4], [-1, -1, -1], [7, 0, 1], [8, 11, 8], [11, 6, 2]])
"""Kept sets with some tokens of every shard, or none; with one token twice; with all."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_entropy": True},
        {"with_entropy": True, "softcap": 2.0},
        {"with_entropy": True, "kept": KEPT},
        {"kept": KEPT, "learns": False},
        {"learns": False},
        {"summed": True},
        {"several": True, "learns": False},
        {"several": True, "with_entropy": True, "kept": KEPT},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_head_with_some_of_the_tokens(threads: Callable, num_ranks: int, options: dict) -> None:
    expected = scores(WHOLE, slice(None), **options)
    size = 12 // num_ranks

    def part() -> dict[str, Tensor | None]:
        start = dist.get_rank() * size
        return scores(SharedVocabulary(group=group(), size=size), slice(start, start + size), **options)

    for rank, found in enumerate(threads(num_ranks, part)):
        for name in ("weight", "bias"):
            of_rank = expected[name]
            expected_part = None if of_rank is None else of_rank[rank * size :][:size]
            torch.testing.assert_close(found.pop(name), expected_part, atol=1e-12, rtol=1e-12)
        rest = {name: x for name, x in expected.items() if name in found}
        torch.testing.assert_close(found, rest, atol=1e-12, rtol=1e-12)


def test_logits_are_those_of_all_tokens(threads: Callable) -> None:
    found = threads(
        3, lambda: SharedVocabulary(group=group(), size=2).joined(torch.full((1, 2), dist.get_rank()))
    )
    assert [x.tolist() for x in found] == [[[0, 0, 1, 1, 2, 2]]] * 3
