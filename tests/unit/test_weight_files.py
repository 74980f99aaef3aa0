"""A model's files are checked before it is loaded: truncated or missing weights, and tokens without an
embedding."""

import json
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import save_file

from openrlhf.errors import ErrorCode
from openrlhf.models.loading import check_model
from openrlhf.models.weight_files import check_weight_files
from openrlhf.tasks.tiny_model import tiny_chat_model

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
    "content", [b"", b"1234", b"\xff" * 20, b"\x05" + bytes(7) + b"[1,2]", b"<html>" * 9]
)
def test_a_file_of_something_else_has_no_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(content)
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert told.value.text.startswith("model-00001-of-00002.safetensors has ")


def test_a_shard_of_the_index_is_missing(tmp_path: Path) -> None:
    weights(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(ErrorCode.INVALID_MODEL, flag=FLAG, value=tmp_path) as told:
        check_weight_files(tmp_path, FLAG)
    assert "lists model-2.safetensors, which is missing" in told.value.text


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
