"""Code in a model's folder never runs, and nobody is asked on a terminal whether it may."""

from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.models import loading, vision


@pytest.mark.parametrize(
    ("module", "name", "load"),
    [
        (loading, "AutoTokenizer", lambda: loading.load_tokenizer("org/model", flag="--model")),
        (loading, "AutoConfig", lambda: loading.load_config("org/model", "--model")),
        (vision, "AutoProcessor", lambda: vision.image_reader("org/model")),
    ],
)
def test_nothing_is_loaded_with_its_code(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, load: Any
) -> None:
    class Asked(Exception):
        pass

    def from_pretrained(path: str, **options: Any) -> None:
        assert path == "org/model" and options["trust_remote_code"] is False
        raise Asked

    monkeypatch.setattr(module, "model_folder", lambda path, **options: path)
    monkeypatch.setattr(module, name, SimpleNamespace(from_pretrained=from_pretrained))
    with pytest.raises(Asked):
        load()
