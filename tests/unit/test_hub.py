"""Models and datasets of ModelScope, whose package is a stand-in (tests/standins)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from refusals import refused

from openrlhf import hub
from openrlhf.cluster import environment
from openrlhf.data.sources import check_columns, load_rows, rows_digest
from openrlhf.errors import ErrorCode
from openrlhf.hub import choose_hub, model_folder
from openrlhf.models import loading
from openrlhf.models.configurations import model_digest
from openrlhf.models.ends import stop_token_ids
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.record.model_card import _is_on_hub

NAME, FLAG = "nobody/tiny", "--model.model_name_or_path"
STANDINS = Path(__file__).parents[1] / "standins"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Makes a hub with one model and one dataset."""
    site = tmp_path_factory.mktemp("site")
    tiny_chat_model(site / "model" / NAME)
    rows = site / "dataset" / "nobody" / "rows" / "data"
    rows.mkdir(parents=True)
    (rows / "train.jsonl").write_text(json.dumps({"input": "a"}) + "\n")
    (rows / "test.jsonl").write_text(json.dumps({"input": "b"}) + "\n")
    return site


@pytest.fixture
def modelscope(site, tmp_path, monkeypatch):
    """Returns the folder that ModelScope's package downloads to."""
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.setenv("MODELSCOPE_SITE", str(site))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(hub.VARIABLE, "")
    choose_hub(True)
    hub._snapshot.cache_clear()
    yield tmp_path / "cache"
    for name in [name for name in sys.modules if name.split(".")[0] == "modelscope"]:
        del sys.modules[name]


def test_weights_are_fetched_only_for_those_who_load_them(modelscope, site):
    loading.check_model(NAME, FLAG)
    tokenizer = load_tokenizer(NAME, flag=FLAG)
    assert stop_token_ids(NAME, tokenizer)
    folder = modelscope / "model" / NAME
    assert not [*folder.glob("*.safetensors")]
    model = loading.load_causal_lm(NAME, flag=FLAG, dtype="fp32", attention="auto")
    whole = loading.load_causal_lm(str(site / "model" / NAME), flag=FLAG, dtype="fp32", attention="auto")
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert model_digest(NAME, FLAG) == model_digest(str(site / "model" / NAME), FLAG)


def test_a_folder_of_this_machine_is_itself(modelscope, tmp_path):
    assert model_folder(str(tmp_path)) == str(tmp_path)
    assert not modelscope.exists()


def test_without_the_flag_names_are_those_of_hugging_face(modelscope):
    choose_hub(False)
    assert model_folder(NAME, weights=True) == NAME
    assert not modelscope.exists()


def test_a_dataset_is_downloaded_from_modelscope(modelscope, site):
    columns = {"--data.input_key": "input"}
    load = lambda item, **options: load_rows(item, flag="--data.dataset", required_columns=columns, **options)
    check_columns("nobody/rows", flag="--data.dataset", required_columns=columns)
    assert not modelscope.exists()
    assert [*load("nobody/rows")] == [{"input": "a"}]
    assert [*load("nobody/rows@data", split="test")] == [{"input": "b"}]
    here = str(site / "dataset" / "nobody" / "rows")
    assert rows_digest("nobody/rows", flag="--data.dataset") == rows_digest(here, flag="--data.dataset")


def test_what_modelscope_does_not_have(modelscope):
    with pytest.raises(ValueError) as error:
        loading.check_model("nobody/else", FLAG)
    assert all(f"{flag} nobody/else" in str(error.value) for flag in (FLAG, "--use_ms"))
    with refused(ErrorCode.NOT_FOUND, flag="--use_ms", value="nobody/else"):
        load_rows("nobody/else", flag="--data.dataset", required_columns={})


def test_without_a_connection_the_copy_is_read_and_named(modelscope, monkeypatch, tmp_path, capsys):
    folder = model_folder(NAME, weights=True)
    hub._snapshot.cache_clear()
    monkeypatch.setenv("MODELSCOPE_SITE", str(tmp_path / "nowhere"))
    assert model_folder(NAME, weights=True) == folder
    note = capsys.readouterr().err
    assert note.startswith(f"note: --use_ms {NAME}: ") and note.endswith(f"{folder}\n")


def test_every_process_of_a_run_looks_there(modelscope, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    forwarded = environment.forwarded()
    assert forwarded[hub.VARIABLE] == "modelscope"
    assert forwarded["MODELSCOPE_CACHE"] == str(modelscope)
    assert "MODELSCOPE_API_TOKEN" not in forwarded
    assert environment.private()["MODELSCOPE_API_TOKEN"] == "secret"


def test_a_model_card_links_to_no_hub_that_was_not_asked(modelscope):
    assert not _is_on_hub(NAME)
    choose_hub(False)
    assert _is_on_hub(NAME)
