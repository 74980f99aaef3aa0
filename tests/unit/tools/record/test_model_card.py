"""The card of a trained model, and the message when the hub refuses it."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from refusals import refused

from openrlhf.config.commands import SFT
from openrlhf.config.sections import CkptConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ErrorCode
from openrlhf.observability.run_folder import RunFolder
from openrlhf.tools.record import model_card
from openrlhf.tools.record.model_card import write_model_card
from openrlhf.training.publish import publish, push_to_hub


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(
        tmp_path / "run", config_yaml="adam:\n  lr: 0.1\n", argv=["openrlhf", "sft"], resume=False
    )
    folder.metrics_path.write_text(
        '{"step": 1, "sft/loss": 2.5, "timing/step": 9.0}\n'
        '{"step": 2, "sft/loss": 1.5}\n{"step": 2, "eval/sft/loss": 1.25}\n'
    )
    return folder


def write(tmp_path, run, **changes):
    told = {"base_model": "org/base", "datasets": ["org/rows"], "command": "sft", "method": "Fine-tuning."}
    (tmp_path / "model").mkdir()
    return write_model_card(tmp_path / "model", run.path, **told | changes)


def test_a_card_tells_how_the_model_was_made(tmp_path, run):
    card = ModelCard.load(write(tmp_path, run))
    assert card.data.base_model == "org/base" and card.data.datasets == ["org/rows"]
    assert card.data.library_name == "transformers" and card.data.tags == ["openrlhf", "sft"]
    assert "| sft/loss | 1.5 | 2 |" in card.text and "| eval/sft/loss | 1.25 | 2 |" in card.text
    assert "timing" not in card.text
    assert "lr: 0.1" in card.text and "torch: " in card.text and "openrlhf sft" in card.text


def test_local_paths_are_no_links(tmp_path, run):
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    card = ModelCard.load(write(tmp_path, run, base_model=str(tmp_path), datasets=[str(data)]))
    assert card.data.base_model is None and card.data.datasets is None


@pytest.mark.parametrize(
    ("card", "base"),
    [("---\nbase_model: org/base\n---\n", "org/base"), ("# by hand", None), ("---\nbad: [\n---\n", None)],
)
def test_a_model_of_a_local_model_names_what_that_was_made_from(tmp_path, run, card, base):
    """DPO after SFT is such a case."""
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "README.md").write_text(card)
    made = ModelCard.load(write(tmp_path, run, base_model=str(sft)))
    assert made.data.base_model == base
    assert f"Made from `{sft}`" in made.text


def test_a_refused_upload_says_where_the_model_is(tmp_path, monkeypatch):
    class Refusing:
        def create_repo(self, *args, **kwargs):
            raise OSError("no token")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    with refused(ErrorCode.NOT_WRITABLE, flag="--ckpt.push_to_hub", value="me/model") as told:
        push_to_hub(tmp_path, "me/model")
    assert "no token" in told.value.text and f"hf upload me/model {tmp_path}" in told.value.text


@pytest.mark.parametrize("error", [OSError("no token"), RuntimeError("connection reset")])
def test_a_failed_upload_ends_no_run(tmp_path, monkeypatch, capsys, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=refuse))
    monkeypatch.setattr(model_card, "write_model_card", lambda *args, **options: None)
    config = SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), push_to_hub="me/model"))
    publish(config, SFT, base_model="", datasets="")
    told = capsys.readouterr().err
    assert str(error) in told and f"hf upload me/model {tmp_path}" in told and "[not-writable]" in told


def test_a_run_says_where_its_model_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "openrlhf.training.publish.push_to_hub", lambda folder, repository: f"https://hub/{repository}"
    )
    monkeypatch.setattr(model_card, "write_model_card", lambda *args, **options: None)
    config = SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), push_to_hub="me/model"))
    publish(config, SFT, base_model="", datasets="")
    said = capsys.readouterr().out.splitlines()
    assert said == [f"model saved to {tmp_path}", "model uploaded to https://hub/me/model"]


def test_a_card_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
    """It may be another package's; the model is complete, and is uploaded."""

    def fails(folder: str, run_dir: str, **about: object) -> None:
        raise KeyError("no template")

    monkeypatch.setattr(model_card, "write_model_card", fails)
    monkeypatch.setattr("openrlhf.training.publish.push_to_hub", lambda *_: "https://hub/me/model")
    config = SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), push_to_hub="me/model"))
    publish(config, SFT, base_model="m", datasets="d")
    told = capsys.readouterr()
    assert "entry point openrlhf.attached.model" in told.err and "no template" in told.err
    assert told.out.splitlines() == [f"model saved to {tmp_path}", "model uploaded to https://hub/me/model"]


def test_an_upload_replaces_the_model_and_leaves_checkpoints_and_logs_here(tmp_path, monkeypatch):
    """An adapter that was left in the repository would take the place of the model."""
    sent = {"config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja", "README.md"}
    for name in [
        *sent,
        "checkpoints/latest",
        "state/global_step1/model.pt",
        "log/rollouts/step_000001.parquet",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    there = {
        "config.json",
        "adapter_config.json",
        "model-00001-of-00002.safetensors",
        "LICENSE",
        "models/model.safetensors",
    }

    class Hub:
        def create_repo(self, repository, *, private, exist_ok):
            assert private and exist_ok and repository == "me/model"
            return f"https://hub/{repository}"

        def list_repo_files(self, repository):
            return [*there]

        def upload_folder(self, *, folder_path, allow_patterns, delete_patterns, **_):
            found = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")]
            there.difference_update(filter_repo_objects([*there], allow_patterns=delete_patterns))
            there.update(filter_repo_objects(found, allow_patterns=allow_patterns))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert push_to_hub(tmp_path, "me/model") == "https://hub/me/model"
    assert there == sent | {"LICENSE", "models/model.safetensors"}
