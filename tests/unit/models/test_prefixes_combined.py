"""Common prefixes are read once in combination with everything else that changes how a model computes:
objectives, adapters, ranks that share rows or matrices, layers that are computed again, other kernels."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_sequence_parallel
import test_tensor_parallel
import torch
from refusals import refused
from test_lora import adapted, lora_of, randomised
from test_prefixes import RELATED, check_equal, losses_and_gradients, row_of, small_qwen
from test_sequence_parallel import OBJECTIVES, passed, policy, sharing

from openrlhf.errors import ErrorCode
from openrlhf.models import backbone
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.dropout import enable_checkpointing, set_training
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.rows import Sample
from openrlhf.tasks.tiny_model import tiny_chat_model

LAYERS = 8
"""Two layers of attention and MLP, forward and backward."""
ROUNDING = LAYERS * 64 * 2.0**-24
"""Relative error of gradients that pass through `LAYERS` float32 sums of 64 products in another order."""


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which every pass adds whether it read a tree of prefixes."""
    found, tree_of_pass = [], backbone._common_prefixes

    def record(*args: Any) -> Any:
        tree = tree_of_pass(*args)
        found.append(tree is not None)
        return tree

    monkeypatch.setattr(backbone, "_common_prefixes", record)
    return found


def related(seed: int = 0) -> list[Sample]:
    """Returns four samples: a branch, a branch of the branch, and one of another beginning."""
    random = torch.Generator().manual_seed(seed + 4)
    draw = lambda count: torch.randint(3, 61, (count,), generator=random)
    prompt, turn = draw(11), draw(6)
    sequences = [[prompt, draw(4)], [prompt, turn, draw(5)], [draw(9)], [prompt, turn, draw(3)]]
    made = []
    for sequence in map(torch.cat, sequences):
        mask = torch.rand(len(sequence), generator=random) < 0.6
        mask[0], mask[-1] = False, True
        made.append(Sample(token_ids=sequence, action_mask=mask))
    return made


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.few(5)
def test_every_objective(threads, monkeypatch, trees, name):
    """One rank, two ranks that share rows, and two that share matrices."""
    monkeypatch.setattr(test_sequence_parallel, "samples", related)
    build, row_with, objective_of = OBJECTIVES[name]
    module, row = build(), row_with()
    expected = passed(copy.deepcopy(module), row, objective_of)
    assert not any(trees)
    get_row_layout(module.model).shares_prefixes = True
    test_sequence_parallel.check_equal([passed(copy.deepcopy(module), row, objective_of)], expected)
    assert any(trees)
    on_ranks = test_sequence_parallel.on_ranks(threads, module, row, objective_of, 2, "ulysses")
    test_sequence_parallel.check_equal(on_ranks, expected)
    if name != "balance":  # experts cannot be divided
        on_ranks = test_tensor_parallel.on_ranks(threads, module, row, objective_of, 2)
        test_tensor_parallel.check_equal(on_ranks, expected)


@pytest.mark.parametrize("mode", ["ring", "allgather"])
def test_ranks_that_do_not_exchange_heads_read_whole_rows(threads, caplog, mode):
    module = PolicyModel(policy()).float()

    def resolved(share: str) -> bool:
        own = copy.deepcopy(module)
        layout = get_row_layout(own.model)
        layout.sharing, layout.share_prefixes = sharing(mode), share
        resolve_row_layout(lambda: own(), own)
        return layout.shares_prefixes

    def refusal() -> str:
        with refused(ErrorCode.UNSUPPORTED, flag="--ds.share_prefixes", value="true") as found:
            resolved("true")
        return found.value.text

    with caplog.at_level("INFO"):
        assert threads(2, lambda: resolved("auto")) == [False, False]
    (line,) = [r.getMessage() for r in caplog.records if "common prefixes" in r.getMessage()]
    assert "--ds.sequence_parallel_mode" in line and "\n" not in line
    for text in threads(2, refusal):
        assert "--ds.sequence_parallel_mode" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("lm"), hidden_size=64, num_layers=2)


def of_adapters(folder: Path) -> PolicyModel:
    return PolicyModel(adapted(folder))


def of_adapters_on_four_bits(folder: Path) -> PolicyModel:
    options: dict[str, Any] = {"flag": "--model", "dtype": "fp32", "attention": "auto", "in_4bit": True}
    return PolicyModel(randomised(prepare_for_training(load_causal_lm(str(folder), **options), lora_of())))


@pytest.mark.parametrize("build", [of_adapters, of_adapters_on_four_bits])
def test_adapters(folder: Path, trees: list[bool], build: Callable) -> None:
    module = build(folder)
    resolve_row_layout(lambda: module(), module)
    assert get_row_layout(module.model).shares_prefixes
    check_equal(module, row_of(*RELATED), ROUNDING)
    assert trees == [False, True]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again(trees, reentrant, dropout, on_host):
    """The configuration has dropout where passes switch it off."""
    module = small_qwen(attention_dropout=0.0 if dropout else 0.1)
    row, layout = row_of(*RELATED), get_row_layout(module.model)
    layout.has_noise = not dropout
    expected = losses_and_gradients(module, row, shared=True)
    enable_checkpointing(module.model, reentrant=reentrant, dropout=dropout, on_host=on_host)
    set_training(module, dropout=dropout)
    found = losses_and_gradients(module, row, shared=True)
    assert trees == [True, True]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    check_equal(module, row, ROUNDING)


def test_half_precision_is_as_exact_as_without_sharing() -> None:
    """Both ways round to bfloat16, in another order; float64 tells how far they are from the numbers that
    they stand for."""
    module, row = small_qwen().double(), row_of(*RELATED)
    exact = losses_and_gradients(module, row, shared=False)
    module.bfloat16()
    errors: dict[bool, list[float]] = {}
    for shared in (False, True):
        found = losses_and_gradients(module, row, shared=shared)
        errors[shared] = [
            float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)
        ]
    for of_shared, of_whole in zip(errors[True], errors[False], strict=True):
        assert 2.0**-9 < of_whole < 0.2
        assert of_shared < 1.25 * of_whole
