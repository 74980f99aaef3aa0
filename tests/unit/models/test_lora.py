"""Adapters compute what the dense model that they stand for computes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from refusals import printed, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.config.commands import DPO, LORA_COMBINER, RM, SFT
from openrlhf.config.parse import parse
from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
from openrlhf.errors import ErrorCode
from openrlhf.models import lora
from openrlhf.models.checkpoint_layout import CLASSIFIER_HEAD
from openrlhf.models.dropout import has_adapter_dropout
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import (
    Merge,
    adapted_layers,
    adapter_weights,
    base_weights,
    disabled_adapters,
    fill_randomly,
    load_statistics,
    merged_weights,
    prepare_for_training,
    save_adapter,
)
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.models.self_check import transformers_attention
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.prepare import prepare
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tools.selftest.verify import check_adapters
from openrlhf.tools.serve.flags import lora_combiner as combine

ALPHA, RANK = 12, 3
SCALE = ALPHA / RANK
HIDDEN = 96
"""Hidden size of the tiny model."""
ROUNDING = HIDDEN * 2**-24
"""Relative rounding error: a float32 sum of HIDDEN products errs by at most this share of |a| |b|, whatever
the order of additions, which differs between CPUs."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    return prepare(folder, seed=0, num_pretrain=4, num_sft=4, num_prompts=4, num_eval=4).model


@pytest.fixture(scope="module")
def row() -> PackedRow:
    random = torch.Generator().manual_seed(1)
    samples = []
    for length in (9, 4, 17):
        mask = torch.rand(length, generator=random) < 0.6
        mask[0], mask[-1] = False, True
        ids = torch.randint(3, 300, (length,), generator=random)
        samples.append(Sample(token_ids=ids, action_mask=mask))
    return PackedRow.of(samples)


def plain(base: Path) -> hf.PreTrainedModel:
    return load_causal_lm(str(base), flag="--model", dtype="fp32", attention="auto")


def adapted(base: Path, **lora) -> hf.PreTrainedModel:
    """Returns a model with adapters that are not zero."""
    return randomised(prepare_for_training(plain(base), lora_of(**lora)))


def lora_of(**lora) -> DeepSpeedConfig:
    return DeepSpeedConfig(lora=LoraConfig(**({"rank": RANK, "alpha": ALPHA} | lora)))


def randomised(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    random = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data = 0.1 * torch.randn(param.shape, generator=random)
    return model


def trained(model: hf.PreTrainedModel) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def weights_of(model: hf.PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in trained(model).items()}


def logits(model, row: PackedRow) -> Tensor:
    with torch.no_grad(), transformers_attention(model):
        return model(row.token_ids[None, :9], use_cache=False).logits


def test_gradients_are_those_of_the_dense_model(base: Path, row: PackedRow) -> None:
    """The dense weight is W' = W + s B A, so dB = s dW' A^T and dA = s B^T dW'."""
    model = adapted(base)
    PolicyModel(model)(row).log_probs.mean().backward()
    dense, found = plain(base), dict(model.named_parameters())
    for name, param in dense.named_parameters():
        a = found.get(name.replace("weight", "lora_A.default.weight"))
        if a is not None:
            param.data += SCALE * found[name.replace("weight", "lora_B.default.weight")].data @ a.data
    PolicyModel(dense)(row).log_probs.mean().backward()
    compared = 0
    for name, param in dense.named_parameters():
        a, b = (found.get(name.replace("weight", f"lora_{x}.default.weight")) for x in "AB")
        if a is None:
            continue
        assert a.grad.abs().max() > 1e-4 and b.grad.abs().max() > 1e-4
        for ours, theirs in (
            (b.grad, SCALE * param.grad @ a.data.T),
            (a.grad, SCALE * b.data.T @ param.grad),
        ):  # a gradient passes through the head, two layers of two products, and this product
            atol = 6 * ROUNDING * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
        compared += 1
    assert 2 * compared == len(trained(model)) == sum(p.grad is not None for p in model.parameters())


def test_all_linear_is_every_linear_layer_but_the_head(base: Path) -> None:
    model = adapted(base)
    linear = [n for n, m in plain(base).named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    expected = {f"{name}.lora_{x}.default.weight" for name in linear for x in "AB"}
    assert trained(model).keys() == expected and len(expected) > 20


def test_chosen_modules_alone_are_adapted(base: Path) -> None:
    model = adapted(base, target_modules=("q_proj", "layers.0.mlp.up_proj"))
    layers = model.config.num_hidden_layers
    assert len(trained(model)) == 2 * (layers + 1)
    assert all("q_proj" in name or "layers.0.mlp.up_proj" in name for name in trained(model))


@pytest.mark.parametrize("wanted", [("all-linear",), ("q_proj", "layers.0.mlp.up_proj")])
def test_an_engine_is_told_which_layers_are_adapted(base: Path, wanted: tuple[str, ...]) -> None:
    lora = lora_of(target_modules=wanted).lora
    adapters = (
        n for n in trained(adapted(base, target_modules=wanted)) if n.endswith(".lora_A.default.weight")
    )
    last_names = {name.removesuffix(".lora_A.default.weight").rpartition(".")[2] for name in adapters}
    assert set(adapted_layers(str(base), "--model", lora)) == last_names


def test_weights_and_adapter_apart_are_the_merged_weights(base: Path, tmp_path: Path) -> None:
    """The adapter has the names of the one that is written."""
    model = adapted(base)
    adapter = adapter_weights(model)
    save_adapter(model, weights_of(model), tmp_path)
    assert adapter.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    below, merged, dense = base_weights(model), merged_weights(model), dict(plain(base).named_parameters())
    assert below.keys() == merged.keys() and dense.keys() <= below.keys()
    changed = 0
    for name, weight in below.items():
        assert torch.equal(weight.merged(), dense[name])
        a, b = (adapter.get(f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}") for x in "AB")
        if a is not None:
            assert torch.equal(merged[name].merged(), weight.merged() + SCALE * (b @ a))
            changed += 1
    assert 2 * changed == len(adapter)


def with_b_of(model: Any, size: float) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape) * size)
    return model


def test_adapters_are_merged_in_float32_and_then_rounded(base: Path) -> None:
    """The fraction that is left is that of the definition, computed in float64."""
    ds = lora_of()
    fractions = []
    for size in (0.0, 1e-5, 1e-3, 1.0):
        loaded = load_causal_lm(str(base), flag="--model", dtype="bf16", attention="auto")
        model = with_b_of(prepare_for_training(loaded, ds), size)
        merge, kept, wanted = Merge(), 0.0, 0.0
        for weight in merged_weights(model).values():
            found = weight.merged(merge)
            if weight.layer is None:
                continue
            a, b = (
                part["default"].weight.detach().double()
                for part in (weight.layer.lora_A, weight.layer.lora_B)
            )
            change = weight.layer.scaling["default"] * (b @ a)
            assert found.dtype == torch.bfloat16
            expected = (weight.stored.double() + change).bfloat16()
            assert (found == expected).double().mean() > 0.999  # products differ by float32's rounding
            kept += float(((found.double() - weight.stored.double()) * change).sum())
            wanted += float(change.pow(2).sum())
        if not size:
            assert merge.fraction is None
            continue
        assert merge.fraction == pytest.approx(kept / wanted, rel=1e-4)
        fractions.append(kept / wanted)
    assert fractions[0] < 0.3 and fractions[-1] == pytest.approx(1, abs=0.01)
    assert fractions == sorted(fractions)


@pytest.mark.parametrize(("size", "is_told"), [(1e-6, True), (1.0, False)])
def test_the_combiner_rounds_once_and_tells_what_rounding_loses(base, tmp_path, capsys, size, is_told):
    model = with_b_of(adapted(base), size)
    save_adapter(model, weights_of(model), tmp_path / "adapter")
    model.peft_config["default"].base_model_name_or_path = str(base)
    flags = ["--model_path", str(base), "--lora_path", str(tmp_path / "adapter")]
    for dtype in ("bf16", "fp32"):
        combine([*flags, "--output_path", str(tmp_path / dtype), "--ds.param_dtype", dtype])
    said = capsys.readouterr().err
    assert said.count("is left after rounding to bfloat16") == is_told and "float32" not in said
    rounded, exact = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("bf16", "fp32"))
    stored = load_file(base / "model.safetensors")
    layers = [name for name in exact if not torch.equal(exact[name], stored[name])]
    assert layers
    for name in layers:
        change = exact[name].double() - stored[name].double()
        expected = (stored[name].bfloat16().double() + change).bfloat16()
        assert (rounded[name] == expected).double().mean() > 0.99  # `change` is a difference of float32


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "norm"])
def test_a_module_that_cannot_be_adapted(base: Path, name: str) -> None:
    with refused(ErrorCode.INVALID_VALUE, flag="--ds.lora.target_modules", value=name, told="q_proj"):
        adapted(base, target_modules=("k_proj", name))


def test_a_model_without_linear_layers_gets_no_adapter(base: Path) -> None:
    model = plain(base)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, torch.nn.Identity())
    for names in (("all-linear",), ("q_proj",)):
        with refused(ErrorCode.INVALID_VALUE, flag="--ds.lora.target_modules", value=names[0]) as told:
            prepare_for_training(model, lora_of(target_modules=names))
        assert f"{type(model).__name__} has none" in told.value.text and "--ds.lora.rank 0" in told.value.text


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("wanted", [("all-linear",), ("c_attn", "h.0.mlp.c_fc")])
def test_the_layers_of_gpt_2_are_adapted(tmp_path: Path, in_4bit: bool, wanted: tuple[str, ...]) -> None:
    """Their weights are (in, out); bitsandbytes stores them as (out, in)."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto"}
    model = load_causal_lm(str(tmp_path), in_4bit=in_4bit, **options)
    randomised(prepare_for_training(model, lora_of(target_modules=wanted)))
    expected = 2 * 4 if wanted == ("all-linear",) else 3
    assert len(adapter_weights(model)) == 2 * expected
    fresh = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    plain_logits = fresh(ids).logits
    merged = {name: weight.merged() for name, weight in merged_weights(model).items()}
    shapes = {name: weight.shape for name, weight in merged_weights(model).items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in merged.items()}
    assert not fresh.load_state_dict(merged, strict=False).unexpected_keys
    with torch.no_grad(), transformers_attention(model):
        expected_logits = model(ids).logits
    norm = fresh.transformer.wte.weight.norm(dim=-1).max().item()
    atol = 64 * 2**-24 * 64**0.5 * norm * 2  # |hidden| is sqrt(64) after the last norm
    torch.testing.assert_close(fresh(ids).logits, expected_logits, atol=atol, rtol=0)
    assert (plain_logits - expected_logits).abs().max() > 100 * atol
    save_adapter(model, weights_of(model), tmp_path / "adapter")
    if not in_4bit:
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
        torch.testing.assert_close(loaded(ids).logits, expected_logits, atol=atol, rtol=0)


def test_adapters_start_the_same_whatever_randomness_was_used_before(base: Path) -> None:
    def starts(numbers: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        torch.rand(numbers)
        return weights_of(prepare_for_training(plain(base), lora_of()))

    one, other = starts(0), starts(5)
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(4)
    third = weights_of(prepare_for_training(plain(base), lora_of()))
    assert any(not torch.equal(one[name], third[name]) for name in one)


def test_disabled_adapters_give_the_model_before_training(base: Path, row: PackedRow) -> None:
    policy, reference = PolicyModel(adapted(base)), PolicyModel(plain(base))
    before, names = policy(row).log_probs, trained(policy.model).keys()
    with torch.no_grad(), disabled_adapters(policy.model):
        assert torch.equal(policy(row).log_probs, reference(row).log_probs)
    assert torch.equal(policy(row).log_probs, before)
    assert (before - reference(row).log_probs).abs().max() > 0.1
    assert trained(policy.model).keys() == names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, layer: layer.scaling.update(default=1.0), "the scale of the adapter"),
        (lambda model, layer: layer.enable_adapters(False), "off, and must be on"),
        (lambda model, layer: layer.requires_grad_(True), "base_layer.weight is trained"),
        (lambda model, layer: model.requires_grad_(False), "adapters that are trained is 0"),
        (lambda model, layer: model.model.norm.requires_grad_(True), "model.norm.weight is trained"),
    ],
)
def test_a_run_checks_its_adapters(base: Path, change: Callable, said: str) -> None:
    model, lora = adapted(base), lora_of().lora
    check_adapters(model, lora, 1)
    change(model, model.get_submodule("model.layers.0.self_attn.q_proj"))
    with refused(ErrorCode.BROKEN_INVARIANT, told=said):
        check_adapters(model, lora, 1)


def test_a_random_adapter_changes_each_layer_by_half_of_its_input(base: Path) -> None:
    model, inputs = adapted(base), torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(0))
    fill_randomly(adapter_weights(model), lora_of().lora, seed=3)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    moved = inputs @ layer.get_delta_weight("default").T
    assert moved.std().item() == pytest.approx(0.5 * inputs.std().item(), rel=0.5)


def test_a_saved_adapter_loads_with_peft_and_with_transformers(base, row, tmp_path):
    model = adapted(base)
    save_adapter(model, weights_of(model), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(base), RANK, ALPHA)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # as peft writes it
    fresh = hf.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(fresh, tmp_path), row), logits(model, row))
    assert torch.equal(logits(hf.AutoModelForCausalLM.from_pretrained(tmp_path), row), logits(model, row))


def test_an_adapter_that_peft_would_ignore_is_not_saved(base, tmp_path, monkeypatch):
    model = adapted(base)
    weights = weights_of(model)
    with refused(ErrorCode.BROKEN_INVARIANT):
        save_adapter(model, dict([*weights.items()][1:]), tmp_path)
    right = lora._name_on_disk
    longer = lambda model, name: right(model, name).replace("base_model.model.", "base_model.model.model.")
    monkeypatch.setattr(lora, "_name_on_disk", longer)
    with refused(ErrorCode.BROKEN_INVARIANT):
        save_adapter(model, weights, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_adapter_is_not_taken_for_a_model(base: Path, tmp_path: Path) -> None:
    save_adapter(model := adapted(base), weights_of(model), tmp_path)
    with refused(ErrorCode.INVALID_MODEL, flag="--model", value=tmp_path, told="openrlhf lora_combiner"):
        load_causal_lm(str(tmp_path), flag="--model", dtype="fp32", attention="auto")


def combined(base: Path, adapter: Path, *more: str) -> Path:
    output = adapter / "merged"
    words = f"--model_path {base} --lora_path {adapter} --output_path {output} --ds.param_dtype fp32"
    combine([*words.split(), *more])
    return output


def test_the_merged_policy_is_the_policy_with_its_adapter(base: Path, row: PackedRow, tmp_path: Path) -> None:
    save_adapter(model := adapted(base), weights_of(model), tmp_path)
    merged = hf.AutoModelForCausalLM.from_pretrained(output := combined(base, tmp_path))
    assert "lora" not in " ".join(merged.state_dict())
    weight_norm = merged.get_output_embeddings().weight.norm(dim=-1).max().item()
    atol = ROUNDING * HIDDEN**0.5 * weight_norm  # |hidden| is sqrt(HIDDEN) after the last norm
    torch.testing.assert_close(logits(merged, row), logits(model, row), atol=atol, rtol=0)
    assert (logits(merged, row) - logits(plain(base), row)).abs().max() > 0.1
    found = dict(model.named_parameters())
    for name, param in merged.named_parameters():
        a, b = (found.get(name.replace("weight", f"lora_{x}.default.weight")) for x in "AB")
        own = found.get(name, found.get(name.replace("weight", "base_layer.weight")))
        assert torch.equal(param, own if a is None else own + b @ a * SCALE), name
    assert hf.AutoTokenizer.from_pretrained(output).chat_template


@pytest.mark.parametrize("head", ["score", "value_head"])
def test_the_merged_reward_model_keeps_head_and_statistics(base, row, tmp_path, head):
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    torch.manual_seed(2)
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto"}
    scorer = load_scorer(str(base), head_prefix=head, tokenizer=tokenizer, **options)
    randomised(prepare_for_training(scorer.model, lora_of()))
    assert f"{head}.weight" in trained(scorer.model)
    check_adapters(scorer.model, lora_of().lora, 1)
    getattr(scorer.model, head).weight.data.normal_()
    scorer.model.config.mean, scorer.model.config.std = 0.25, 2.5
    save_adapter(scorer.model, weights_of(scorer.model), tmp_path)
    assert load_statistics(tmp_path) == {"mean": 0.25, "std": 2.5}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == [CLASSIFIER_HEAD]
    fresh = hf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).state_dict()
    (saved,) = (name for name in loaded if name.endswith("score.modules_to_save.default.weight"))
    assert torch.equal(loaded[saved], getattr(scorer.model, head).weight)
    with torch.no_grad():
        expected = scorer(row)
        merged = load_scorer(str(combined(base, tmp_path, "--is_rm")), **options)
        # |hidden| is sqrt(HIDDEN) after the last norm
        atol = ROUNDING * HIDDEN**0.5 * getattr(scorer.model, head).weight.norm().item()
        torch.testing.assert_close(merged(row), expected, atol=atol, rtol=0)
        with disabled_adapters(scorer.model):
            assert (scorer(row) - expected).abs().max() > 100 * atol
    config = merged.model.config
    assert (config.mean, config.std, config.num_labels) == (0.25, 2.5, 1)
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    ids = row.token_ids[:9][None]
    assert torch.equal(classifier.score.weight, getattr(scorer.model, head).weight)
    if head == CLASSIFIER_HEAD:
        with transformers_attention(scorer.model):
            expected = scorer.model(ids).logits
        torch.testing.assert_close(classifier(ids).logits, expected, atol=atol, rtol=0)


def stderr_of(capsys: pytest.CaptureFixture, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        combine(list(words))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_an_adapter_of_another_base_is_refused(base, tmp_path, capsys):
    save_adapter(model := adapted(base), weights_of(model), tmp_path / "adapter")
    for number, (change, said) in enumerate(
        [
            ({"hidden_size": 64}, "size mismatch"),
            ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "layers.1."),
        ]
    ):
        config = hf.AutoConfig.from_pretrained(base, **change)
        other = tmp_path / f"other{number}"
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(other)
        load_tokenizer(str(base), flag="--x").save_pretrained(other)
        words = ["--model_path", str(other), "--lora_path", str(tmp_path / "adapter")]
        text = stderr_of(capsys, *words, "--output_path", str(tmp_path / "out"))
        (refusal,) = printed(text)
        assert (refusal.code, refusal.place) == (ErrorCode.INVALID_MODEL, f"--lora_path {tmp_path}/adapter")
        assert all(name in refusal.text for name in (f"--model_path {other}", str(base), said))
        assert f"was trained on {base}, and is merged into --model_path {other}" in text
        assert not (tmp_path / "out").exists()


def test_an_adapter_whose_files_belong_to_different_adapters_is_refused(base, tmp_path, capsys):
    save_adapter(model := adapted(base), weights_of(model), tmp_path / "adapter")
    words = ["--model_path", str(base), "--lora_path", str(tmp_path / "adapter")]
    words += ["--output_path", str(tmp_path / "out")]
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": RANK + 5}))
    (refusal,) = printed(stderr_of(capsys, *words))
    assert (refusal.code, refusal.place) == (ErrorCode.INVALID_MODEL, f"--lora_path {tmp_path}/adapter")
    assert f"has rank {RANK + 5}" in refusal.text and f"has rank {RANK}." in refusal.text
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"cut")
    (refusal,) = printed(stderr_of(capsys, *words))
    assert refusal.code == ErrorCode.INVALID_MODEL and "cannot be read" in refusal.text
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_combiner(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_adapter(model := adapted(base), weights_of(model), tmp_path)
    adapter, out = ("--lora_path", str(tmp_path)), ("--output_path", str(tmp_path / "out"))
    (refusal,) = printed(stderr_of(capsys, "--model_path", str(base), *adapter, *out, "--is_rm"))
    assert (refusal.code, refusal.place) == (ErrorCode.INVALID_MODEL, f"--lora_path {tmp_path}")
    assert "--is_rm" in refusal.text
    (refusal,) = printed(stderr_of(capsys, "--model_path", str(base), "--lora_path", str(base), *out))
    assert (refusal.code, refusal.place) == (ErrorCode.INVALID_MODEL, f"--lora_path {base}")
    (refusal,) = printed(stderr_of(capsys, "--model_path", str(tmp_path), *adapter, *out))
    assert (refusal.code, refusal.place) == (ErrorCode.INVALID_MODEL, f"--model_path {tmp_path}")
    (refusal,) = printed(stderr_of(capsys, "--model_path", str(base), *adapter, "--output_path", str(base)))
    assert (refusal.code, refusal.place) == (ErrorCode.NOT_WRITABLE, f"--output_path {base}")
    assert "--overwrite" in refusal.text


ADAPTERS = {
    "embedding and head in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head in full": {"modules_to_save": ["lm_head"]},
    "embedding in full": {"modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "magnitudes (DoRA)": {"use_dora": True},
    "ranks of layers": {"rank_pattern": {"layers.0.self_attn.q_proj": 2}},
}


def test_adapters_of_experts_merge_into_the_model_that_peft_computes(tmp_path: Path) -> None:
    """All experts of a layer share one weight, whose adapter has the rank of each."""
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = hf.Qwen3MoeConfig(**sizes)
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    about = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=experts, task_type="CAUSAL_LM")
    load = partial(hf.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model = peft.get_peft_model(load(tmp_path / "base"), about)
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.requires_grad):
            param += torch.randn_like(param)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(9)[None]
    expected = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")(ids).logits
    merged = load(combined(tmp_path / "base", tmp_path / "adapter"))(ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    assert (expected - load(tmp_path / "base")(ids).logits).abs().max() > 0.01


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.few(3)
def test_adapters_of_peft_merge_into_the_model_that_peft_computes(base, row, tmp_path, options, tied):
    config = hf.AutoConfig.from_pretrained(base, tie_word_embeddings=tied)
    torch.manual_seed(3)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    load_tokenizer(str(base), flag="--x").save_pretrained(tmp_path / "base")
    fresh = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    about = peft.LoraConfig(**({"r": 3, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options))
    model = peft.get_peft_model(fresh, about)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param += 0.05 * torch.randn_like(param) * (1 if "magnitude" not in name else param.mean())
    model.save_pretrained(tmp_path / "adapter")
    merged = hf.AutoModelForCausalLM.from_pretrained(combined(tmp_path / "base", tmp_path / "adapter"))
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = row.token_ids[:9][None]
    expected = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")(ids).logits
    weight_norm = merged.get_output_embeddings().weight.norm(dim=-1).max().item()
    atol = 4 * ROUNDING * HIDDEN**0.5 * weight_norm  # two layers, and the products of the adapter
    torch.testing.assert_close(merged(ids).logits, expected, atol=atol, rtol=0)
    assert (
        expected - hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
    ).abs().max() > atol


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_keeps_the_type_of_its_base(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    hf.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(tmp_path / "base")
    load_tokenizer(str(base), flag="--x").save_pretrained(tmp_path / "base")
    save_adapter(model := adapted(base), weights_of(model), tmp_path / "adapter")
    words = f"--model_path {tmp_path}/base --lora_path {tmp_path}/adapter --output_path {tmp_path}/merged"
    combine(words.split())
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == dtype
    assert hf.AutoConfig.from_pretrained(tmp_path / "merged").dtype == dtype


def test_a_merge_says_that_its_base_has_a_head_of_its_own(base: Path, tmp_path: Path) -> None:
    """The base's configuration ties them, as peft's own merges write it."""
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "base")
    load_tokenizer(str(base), flag="--x").save_pretrained(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    head = model.get_input_embeddings().weight.detach() + 1
    save_file(load_file(file) | {"lm_head.weight": head}, file, {"format": "pt"})
    save_adapter(own := adapted(base), weights_of(own), tmp_path / "adapter")
    merged = combined(tmp_path / "base", tmp_path / "adapter")
    assert hf.AutoConfig.from_pretrained(merged).tie_word_embeddings is False
    assert torch.equal(load_file(merged / "model.safetensors")["lm_head.weight"], head)


def test_the_old_spelling_of_the_combiners_precision() -> None:
    assert LORA_COMBINER.config_type().ds.param_dtype is None
    words = "--model_path m --lora_path l --output_path o --is_rm --param_dtype fp16"
    config = parse(LORA_COMBINER, words.split()).config
    assert config.is_rm and config.ds.param_dtype == "fp16"


FOUR_BITS = "--ds.load_in_4bit --ds.lora.rank 8"


@pytest.mark.parametrize("command", [SFT, RM, DPO], ids=lambda command: command.name)
@pytest.mark.parametrize(
    ("flags", "code"),
    [("--ds.load_in_4bit", ErrorCode.CONFLICT), (f"{FOUR_BITS} --ds.zero_stage 3", ErrorCode.UNSUPPORTED)],
)
def test_four_bits_that_cannot_train(command, flags: str, code: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(command, ["--model.model_name_or_path", "m", "--data.dataset", "d", *flags.split()])
    found = [(refusal.code, refusal.place) for refusal in printed(capsys.readouterr().err)]
    assert (code, "--ds.load_in_4bit") in found


def test_four_bits_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    words = f"--model.model_name_or_path m --data.dataset d --data.output_key o {FOUR_BITS}".split()
    assert parse(SFT, words).config.ds.load_in_4bit
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(SFT, words)
    assert 'pip install "openrlhf[qlora]"' in capsys.readouterr().err


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_with_dropout_do_not_train_on_shared_rows(base: Any, dropout: float) -> None:
    assert has_adapter_dropout(adapted(base, dropout=dropout)) == (dropout > 0)
