import gzip

import pytest
from row_files import FLAG, ROWS, WRITERS, load, write_csv, write_lines

from openrlhf.data import outline
from openrlhf.data.outline import count_rows


def counted(spec, *, probs=None, split="train", max_samples=10**6, seed=42):
    return count_rows(str(spec), flag=FLAG, probs=probs, split=split, max_samples=max_samples, seed=seed)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_counted_in_every_format(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert counted(tmp_path / name) == 3 and counted(tmp_path / name, max_samples=2) == 2


def test_rows_are_counted_as_they_are_loaded(tmp_path, monkeypatch):
    """Covers a split, packed files, several items, and probabilities that repeat rows."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "parts").mkdir()
    write_lines(tmp_path / "parts" / "train-0.jsonl", [{"input": f"a{i}"} for i in range(30)])
    write_csv(tmp_path / "parts" / "train-1.csv")
    write_lines(tmp_path / "parts" / "test.jsonl", ROWS)
    (tmp_path / "more.jsonl").write_text('{"input": "x"}\n\n{"input": "y"}')
    (tmp_path / "more.csv.gz").write_bytes(gzip.compress(b'input\n"two\nlines"\nb\n'))
    parts, more = tmp_path / "parts", f"{tmp_path}/more.jsonl,{tmp_path}/more.csv.gz"
    assert (counted(parts), counted(parts, split="test"), counted(more)) == (33, 3, 4)
    assert counted(f"{parts},{more}", max_samples=10) == 10
    for seed in range(3):
        mixed = {"probs": "0.2,0.8", "seed": seed, "max_samples": 500}
        both = f"{tmp_path}/parts,{tmp_path}/more.jsonl"
        assert counted(both, **mixed) == len(load(both, **mixed)) > 35


def test_rows_whose_count_takes_long_are_not_counted(tmp_path, monkeypatch):
    """A large table and lines are counted without being parsed."""
    monkeypatch.setattr(outline, "COUNTED", 10)
    for name, write in WRITERS.items():
        write(tmp_path / name)
        parsed = name in ("rows.json", "lines.json", "rows.csv")
        assert counted(tmp_path / name) == (None if parsed else 3), name
    lines = tmp_path / "rows.jsonl"
    assert counted(f"{lines},https://host/rows.jsonl") is None and counted(f"org/name,{lines}") is None
