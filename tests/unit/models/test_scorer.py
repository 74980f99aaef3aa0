"""Reward models score as transformers' own sequence classifier does with their files."""

import json
from pathlib import Path

import pytest
import torch
from refusals import refused
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from openrlhf.errors import ErrorCode
from openrlhf.models.checkpoint_layout import head_name
from openrlhf.models.configurations import load_config
from openrlhf.models.scorer import ScoreModel, ValueModel, load_scorer, padding_token_id
from openrlhf.models.self_check import transformers_attention
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer

TEXTS = [
    "<|user|>Tom has 3 apples.<|end|><|assistant|>3<|end|>",
    "<|user|>How many?<|end|><|assistant|>I do not know how many apples there are.<|end|>",
    "7<|end|>",
]


def make_folder(folder: Path, **special_tokens: str) -> Path:
    """Writes an untrained language model, and a tokenizer with only these special tokens."""
    own = tiny_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own.backend_tokenizer, eos_token="<|end|>", **special_tokens
    )
    tiny_model(own).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("separate"), pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def folder_padded_by_eos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("eos"), pad_token="<|end|>", bos_token="<|user|>")


def train_like(folder: Path, **options) -> tuple[ScoreModel, PreTrainedTokenizerBase]:
    """Returns a scorer with a new head, as `train_rm` begins."""
    tokenizer = load_tokenizer(str(folder), flag="--model")
    torch.manual_seed(3)
    model = load_scorer(
        str(folder), flag="--model", dtype="fp32", attention="auto", tokenizer=tokenizer, **options
    )
    return model, tokenizer


def save(model: ScoreModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> ScoreModel:
    return load_scorer(str(folder), flag="--model", dtype="fp32", attention="auto")


@torch.no_grad()
def packed_scores(model: ScoreModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns one score for each text, read off its last token."""
    samples = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        samples.append(Sample(token_ids=ids, action_mask=torch.arange(len(ids)) == len(ids) - 1))
    return model(PackedRow.of(samples))


@torch.no_grad()
def padded_scores(folder: Path, side: str) -> Tensor:
    """Computes the scores from the files alone, with nothing but transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    batch = tokenizer(TEXTS, padding=True, padding_side=side, add_special_tokens=False, return_tensors="pt")
    assert not batch["attention_mask"].all()
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("which", ["folder", "folder_padded_by_eos"])
def test_padded_scores_of_transformers_equal_packed_scores(request, which, side, tmp_path):
    model, tokenizer = train_like(request.getfixturevalue(which))
    expected = packed_scores(model, tokenizer)
    assert len(set(expected.tolist())) == len(TEXTS)
    found = padded_scores(save(model, tokenizer, tmp_path), side)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_is_no_end_of_sequence(folder, folder_padded_by_eos, tmp_path):
    for source in (folder, folder_padded_by_eos):
        model, tokenizer = train_like(source)
        assert tokenizer.pad_token_id == model.model.config.pad_token_id != tokenizer.eos_token_id
        again = PreTrainedTokenizerFast.from_pretrained(save(model, tokenizer, tmp_path / source.name))
        assert again.pad_token_id == tokenizer.pad_token_id
        assert again.eos_token == "<|end|>"


def test_any_special_token_serves_for_padding(tmp_path):
    make_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), flag="--model")
    assert tokenizer.pad_token == tokenizer.eos_token
    config = load_config(str(tmp_path), "--model")
    token = padding_token_id(tokenizer, config)
    assert token != tokenizer.eos_token_id and tokenizer.added_tokens_decoder[token].special
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # the model has no embedding for it
    assert tokenizer.pad_token_id >= config.vocab_size
    options = {"dtype": "fp32", "attention": "auto", "tokenizer": tokenizer}
    assert load_scorer(str(tmp_path), flag="--model", **options).model.config.pad_token_id == token


def test_a_tokenizer_with_only_an_end_of_sequence_token_is_refused():
    words = Tokenizer(WordLevel({"<end>": 0, "word": 1}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    with refused(ErrorCode.INVALID_MODEL):
        padding_token_id(tokenizer, Qwen3Config())


def test_a_score_is_read_off_each_action_itself(folder):
    model, _ = train_like(folder)
    ids = torch.tensor([5, 9, 17, 30, 8, 12])
    masks = torch.tensor([[False, True, False, False, True, True], [False] * 5 + [True]])
    row = PackedRow.of([Sample(token_ids=ids, action_mask=mask) for mask in masks])
    with torch.no_grad():
        found = model(row)
        with transformers_attention(model.model):
            hidden = model.model.model(ids[None]).last_hidden_state[0]
    expected = (hidden @ model.model.score.weight.t())[:, 0]
    torch.testing.assert_close(found, expected[[1, 4, 5, 5]], atol=1e-5, rtol=1e-5)


def test_another_name_of_the_head_survives(folder, tmp_path):
    model, tokenizer = train_like(folder, head_prefix="value_head")
    assert model.head_name == head_name(model.model.config) == "value_head"
    assert not hasattr(model.model, "score")
    expected = packed_scores(model, tokenizer)
    once = load(save(model, tokenizer, tmp_path / "once"))
    twice = load(save(once, tokenizer, tmp_path / "twice"))
    for again in (once, twice):
        assert torch.equal(again.model.value_head.weight, model.model.value_head.weight)
        torch.testing.assert_close(packed_scores(again, tokenizer), expected, atol=1e-6, rtol=0)


def test_the_name_in_the_files_wins(folder, tmp_path):
    model, tokenizer = train_like(folder, head_prefix="value_head")
    save(model, tokenizer, tmp_path)
    again = load_scorer(
        str(tmp_path), flag="--model", dtype="fp32", attention="auto", head_prefix="other_head"
    )
    assert torch.equal(again.model.value_head.weight, model.model.value_head.weight)


def test_mean_and_deviation_survive(folder, tmp_path):
    model, tokenizer = train_like(folder)
    model.model.config.mean, model.model.config.std = 1.25, 0.5
    config = load(save(model, tokenizer, tmp_path)).model.config
    assert (config.mean, config.std) == (1.25, 0.5)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["mean"], written["std"]) == (1.25, 0.5)
    assert written["architectures"] == ["Qwen3ForSequenceClassification"]


def test_without_actions_zeros_still_flow(folder):
    model, _ = train_like(folder)
    scores = model(PackedRow.empty())
    scores.sum().backward()
    assert scores.shape == (0,)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_half_precision_models_score_in_float32(folder):
    model = load_scorer(str(folder), flag="--model", dtype="bf16", attention="auto")
    row = PackedRow.of([Sample(token_ids=torch.arange(3, 8), action_mask=torch.arange(5) == 4)])
    assert model.model.score.weight.dtype == torch.bfloat16
    assert model(row).dtype == torch.float32


@pytest.mark.parametrize("kind", [ScoreModel, ValueModel])
def test_scores_are_not_rounded_to_half_precision(folder, kind):
    """Rounding would make ties: between 2 and 4, bf16 knows multiples of 1/64."""
    loaded = load_scorer(str(folder), flag="--model", dtype="bf16", attention="auto").eval()
    model = kind(loaded.model)
    head = model.model.score
    head.weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(3, 40)
    row = PackedRow.of([Sample(token_ids=ids, action_mask=torch.arange(len(ids)) > 0)])
    read = []
    head.register_forward_pre_hook(lambda head, args: read.append(args[0]))
    scores = model(row)
    exact = (read[0].double() @ head.weight.double().t())[:, 0]
    assert not torch.equal(exact, exact.bfloat16().double())
    # float32 sums of H products: each is off by 2^-24 of what it adds up
    bound = (read[0].double().abs() @ head.weight.double().abs().t())[:, 0] * len(head.weight[0]) * 2**-24
    assert ((scores.double() - exact).abs() <= bound).all()
    scores.sum().backward()
    assert head.weight.grad.dtype == torch.bfloat16 and head.weight.grad.any()
