"""A model's files are checked before it is loaded: damaged, missing or quantized weights, configurations that
cannot be built or saved, and tokens without an embedding."""

import errno
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from openrlhf.config.lora_combiner import LoraCombinerConfig
from openrlhf.errors import ErrorCode
from openrlhf.models.configurations import load_config
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.loading import check_model, load_causal_lm, load_generator
from openrlhf.models.saving import check_saving
from openrlhf.models.scorer import check_reward_model, load_scorer
from openrlhf.models.sizes import model_size
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.models.weight_files import check_weight_files
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.serve.lora_combiner import run as combine

FLAG = "--model.model_name_or_path"


def weights(folder: Path) -> Path:
    file = folder / "model.safetensors"
    save_file({"a": torch.zeros(10), "b": torch.zeros(2, 3)}, file, {"format": "pt"})
    return file


@pytest.mark.parametrize("change", [-1, -60, 1])
def test_a_file_that_is_cut_or_too_long_is_named_with_its_sizes(tmp_path: Path, change: int) -> None:
    file = weights(tmp_path)
    check_weight_files(tmp_path, FLAG)
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + b"x")
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    size = len(content)
    assert told.value.text.startswith(f"model.safetensors has {size + change:,} bytes instead of {size:,}.\n")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1234", b"\xff" * 20, b"\x05" + bytes(7) + b"[1,2]", b"<html>" * 9),
        (600_000).to_bytes(8, "little") + b'{"a":' * 120_000,
        (39).to_bytes(8, "little") + b'{"a": {"data_offsets": ["one", "two"]}}',
    ],
    ids=len,
)
def test_a_file_of_something_else_has_no_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(content)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert told.value.text.startswith("model-00001-of-00002.safetensors has ")


def test_a_shard_of_the_index_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = weights(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert "lists model-2.safetensors, which is missing, beside a model.safetensors" in told.value.text
    (tmp_path / "model-2.safetensors").write_bytes(file.read_bytes())
    assert not capsys.readouterr().err
    check_weight_files(tmp_path, FLAG)
    assert "model.safetensors is read, and vLLM reads model-2.safetensors" in capsys.readouterr().err


def test_a_model_beside_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    for told in ("not a whole model. Merge the adapter", "weights of a model, too. Move one of them away"):
        with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=str(tmp_path), told=told):
            load_config(str(tmp_path), FLAG)
        weights(tmp_path)


def test_a_token_without_an_embedding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tiny_chat_model(tmp_path / "model", seed=0)
    check_model(str(model), FLAG)
    assert capsys.readouterr().err == ""
    config = json.loads((model / "config.json").read_text())
    fewer = config["vocab_size"] - 3
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": fewer}))
    check_model(str(model), FLAG)
    told = capsys.readouterr().err
    assert FLAG in told and f"embeds {fewer}:" in told and f"(token {fewer})" in told


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{}", b'{"weight_map": [1]}', b"\xff"], ids=len)
def test_an_index_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert told.value.text.startswith("model.safetensors.index.json ")


def test_weights_without_permission_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights(tmp_path)

    def denied(self: Path, *mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)  # root may read every file
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert told.value.text.startswith("model.safetensors cannot be read: Permission denied")


def changed(folder: Path, name: str, **values: object) -> str:
    """Writes a tiny model with other values in one of its files, and returns its folder."""
    model = tiny_chat_model(folder / "model", seed=0)
    file = model / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(model)


def test_weights_that_the_files_lack_would_be_random(tmp_path: Path) -> None:
    """Reward models have no head for tokens; those with a tied one have it."""
    untied = changed(tmp_path / "untied", "config.json", tie_word_embeddings=False)
    cut = changed(tmp_path / "cut", "config.json")
    file = Path(cut, "model.safetensors")
    tensors = load_file(file)
    lost = next(name for name in tensors if "layers.1." in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    options = {"flag": FLAG, "dtype": "fp32", "attention": "auto"}
    for load, model, name in (
        (load_causal_lm, untied, "lm_head.weight"),
        (load_causal_lm, cut, lost),
        (partial(load_generator, max_len=8), untied, "lm_head.weight"),
        (load_scorer, cut, lost),
    ):
        with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
            load(model, **options)
        assert f"lack 1 weight of the model, such as {name}" in told.value.text
    load_scorer(untied, **options)  # with a fresh head


def test_weights_of_another_shape_than_the_configuration_has_are_refused(tmp_path: Path) -> None:
    options = {"flag": FLAG, "dtype": "fp32", "attention": "auto"}
    judge = changed(tmp_path / "judge", "config.json")
    file = Path(judge, "model.safetensors")
    (size, hidden), name = (tensors := load_file(file))["model.embed_tokens.weight"].shape, "embed_tokens"
    save_file(tensors | {"score.weight": torch.zeros(2, hidden)}, file, {"format": "pt"})
    grown = changed(tmp_path / "grown", "config.json", vocab_size=size + 8)
    for load, model, said in (
        (load_causal_lm, grown, f"model.{name}.weight: ({size}, {hidden}),\nnot ({size + 8}, {hidden})"),
        (partial(load_generator, max_len=8), grown, f"model.{name}.weight: ({size}, {hidden})"),
        (load_scorer, judge, f"score.weight: (2, {hidden}),\nnot (1, {hidden})"),
    ):
        with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
            load(model, **options)
        assert said in told.value.text
    load_causal_lm(grown, model_kwargs={"ignore_mismatched_sizes": True}, **options)  # as asked for


def test_a_head_of_its_own_is_in_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """vLLM would compute an export, whose configuration ties them, with the embedding as its head."""
    options = {"flag": FLAG, "dtype": "fp32", "attention": "auto"}
    tied = changed(tmp_path / "tied", "config.json")
    assert load_causal_lm(tied, **options).config.tie_word_embeddings
    merged = changed(tmp_path / "merged", "config.json")
    file = Path(merged, "model.safetensors")
    embedding = (tensors := load_file(file))["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding + 1}, file, {"format": "pt"})
    model = load_causal_lm(merged, **options)
    assert torch.equal(model.get_output_embeddings().weight, embedding + 1)
    assert f"note: {merged}: config.json ties head and embedding" in " ".join(capsys.readouterr().err.split())
    model.save_pretrained(tmp_path / "export")
    assert json.loads((tmp_path / "export/config.json").read_text())["tie_word_embeddings"] is False


def test_weights_that_the_model_lacks_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = changed(tmp_path, "config.json")
    options = {"flag": FLAG, "dtype": "fp32", "attention": "auto"}
    load_causal_lm(model, **options)
    file = Path(model, "model.safetensors")
    save_file(load_file(file) | {"score.weight": torch.zeros(1, 4)}, file, {"format": "pt"})
    assert "lacks" not in capsys.readouterr().err
    load_causal_lm(model, **options)
    assert "such as score.weight (1 of them)" in " ".join(capsys.readouterr().err.split())


METHODS = ("fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "bitsandbytes")


@pytest.mark.parametrize("about", [*({"quant_method": name} for name in METHODS), {"bits": 4}], ids=str)
def test_a_quantized_model_is_refused_wherever_its_weights_would_be_used(tmp_path: Path, about: dict) -> None:
    model = changed(tmp_path, "config.json", quantization_config=about)
    options = {"flag": FLAG, "dtype": "fp32", "attention": "auto"}
    merge = LoraCombinerConfig(model_path=model, lora_path="adapter", output_path="out")
    for use in (
        lambda: check_model(model, FLAG),
        lambda: check_reward_model(model, FLAG, "score"),
        lambda: load_causal_lm(model, **options),
        lambda: load_scorer(model, **options),
        lambda: combine(merge),
    ):
        with refused(ErrorCode.UNSUPPORTED, value=model) as told:
            use()
        assert str(about.get("quant_method", about)) in told.value.text
        assert "dequantize" in told.value.text and "--ds.load_in_4bit" in told.value.text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32], ids=str)
def test_quantized_weights_are_refused_without_a_word_in_the_configuration(
    tmp_path: Path, dtype: Any
) -> None:
    model, options = changed(tmp_path, "config.json"), {"dtype": "fp32", "attention": "auto"}
    file = Path(model, "model.safetensors")
    weights = load_file(file) | {"attn.bias": torch.ones(4, dtype=torch.uint8)}  # a mask, as of GPT-2
    save_file(weights, file, {"format": "pt"})
    check_model(model, FLAG)
    save_file(weights | {"q.weight": torch.zeros(4).to(dtype)}, file, {"format": "pt"})
    for use in (
        check_model,
        lambda path, flag: load_causal_lm(path, flag=flag, **options),
        lambda path, flag: load_generator(path, flag=flag, max_len=8, **options),
    ):
        with refused(ErrorCode.UNSUPPORTED, value=model, told="its weights are quantized ("):
            use(model, FLAG)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**9), ("num_labels", 10**9), ("text_config", {"num_hidden_layers": 3000})],
)
def test_a_number_of_parts_that_no_model_has(tmp_path: Path, name: str, value: object) -> None:
    model = changed(tmp_path, "config.json", **{name: value}, layer_types=None)
    began = time.monotonic()
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
        load_config(model, FLAG)
    assert time.monotonic() - began < 5 and "config.json has num_" in told.value.text


def test_a_size_that_no_memory_has(tmp_path: Path) -> None:
    model = changed(tmp_path, "config.json", hidden_size=1 << 40, intermediate_size=1 << 40)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model):
        model_size(model, FLAG)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("pad_token_id", 10**6, "Padding_idx"),
        ("rope_parameters", {"rope_type": "xyz", "rope_theta": 1e4}, "'xyz'"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}, "'str'"),
        ("num_attention_heads", 0, "zero"),
        ("hidden_size", "96", "expected int, got str (value: '96')"),
        ("eos_token_id", "2", "expected int, got str (value: '2'"),
    ],
)
def test_a_value_of_which_no_model_is_built(tmp_path: Path, name: str, value: object, told: str) -> None:
    model = changed(tmp_path, "config.json", **{name: value})
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model, told=(told, "Correct its files")) as error:
        check_model(model, FLAG)
    assert "config" in error.value.text.partition("\n")[0]


@pytest.mark.parametrize("value", ["</s>", ["2"], 2.0, True])
def test_an_end_of_an_answer_is_the_number_of_a_token(tmp_path: Path, value: object) -> None:
    model = changed(tmp_path, "config.json")
    Path(model, "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with refused(ErrorCode.INVALID_MODEL, value=model, told=("generation_config.json", repr(value))):
        stop_token_ids(model, load_tokenizer(model, flag=FLAG))


@pytest.mark.parametrize("text", ["[]", "{", "null"])
def test_a_damaged_generation_config_is_not_left_out(tmp_path: Path, text: str) -> None:
    """Without its end tokens, no answer of a chat model would end."""
    model = changed(tmp_path, "config.json")
    Path(model, "generation_config.json").write_text(text)
    with refused(ErrorCode.INVALID_MODEL, value=model, told="generation_config.json"):
        stop_token_ids(model, load_tokenizer(model, flag=FLAG))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_deep_file_is_told_in_words(tmp_path: Path, name: str) -> None:
    model = tiny_chat_model(tmp_path / "model", seed=0)
    (model / name).write_text("[" * 200_000)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
        check_model(str(model), FLAG)
    assert len(told.value.text) < 500


@pytest.mark.parametrize("content", ['{"max_new_tokens": 0}', "[" * 200_000, '{"eos_token_id": 3'], ids=len)
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    model = tiny_chat_model(tmp_path / "model", seed=0)
    (model / "generation_config.json").write_text(content)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
        check_saving(str(model), FLAG, load_tokenizer(str(model), flag=FLAG))
    assert told.value.text.startswith("its generation_config.json ")


def test_what_could_not_be_saved_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    model = str(tiny_chat_model(tmp_path / "model", seed=0))
    tokenizer = load_tokenizer(model, flag=FLAG)
    check_saving(model, FLAG, tokenizer)
    tokenizer.init_kwargs["strange"] = object()
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=model) as told:
        check_saving(model, FLAG, tokenizer)
    assert "tokenizer or processor cannot be read and written again" in told.value.text
