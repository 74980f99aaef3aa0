"""The notebook of the first hour, cell by cell."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_hour.ipynb"


def test_its_reader_sees_the_reward_rise(knowing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(knowing.chat))
    names: dict = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == []  # the notebook in the repository has none
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["means"][-1] > names["means"][0] + 0.3, names["means"]
    assert "step 10" in (shown := capsys.readouterr().out) and "Eva has 15 limes" in shown
    assert (tmp_path / "mine" / "model.safetensors").exists()
