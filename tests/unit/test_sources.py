import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openrlhf.config.checks import split_spec
from openrlhf.datasets.sources import check_columns, load_rows

FLAG = "--data.dataset"
ROWS = [{"input": "a", "label": "1"}, {"input": "b", "label": "2"}, {"input": "c", "label": "3"}]


def load(spec, columns=("input",), **options):
    required = {f"--data.{column}_key": column for column in columns}
    return load_rows(str(spec), flag=FLAG, required_columns=required, **options)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path):
    path.write_text("input,label\na,1\nb,2\nc,3\n")


def write_arrow_file(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.jsonl": lambda path: write_lines(path, ROWS),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: write_lines(path, ROWS),
    "rows.csv": write_csv,
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "saved_dict": lambda path: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(
        path
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = load(tmp_path / name, columns=("input", "label"))
    assert list(rows) == ROWS
    assert rows.columns == ["input", "label"]
    check_columns(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "input"})


@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_column_names_the_flag_the_columns_and_the_near_one(tmp_path, name):
    WRITERS[name](tmp_path / name)
    message = (
        r"--data.input_key inptu: .*has no such column.\nIts columns: input, label\nDid you mean input\?"
    )
    for read in (load_rows, check_columns):
        with pytest.raises(ValueError, match=message):
            read(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "inptu"})


def test_values_keep_the_type_and_the_digits_of_the_file(tmp_path):
    rows = [
        {
            "label": "007",
            "x": 0.1234567890123456,
            "n": 2**70,
            "m": [{"role": "user", "content": "hi"}],
            "o": {"a": 1},
        },
        {
            "label": "1",
            "x": 3,
            "n": None,
            "m": [{"role": "user", "content": ["hi", 1], "name": "z"}],
            "o": {},
        },
    ]
    loaded = list(load(write_lines(tmp_path / "a.jsonl", rows), columns=("label",)))
    assert loaded == rows
    assert [type(row["x"]) for row in loaded] == [float, int]


def test_a_column_of_two_types_is_refused_with_both_rows(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [*[{"input": "a", "label": "1"}] * 500, {"input": "a", "label": 1}]
    )
    with pytest.raises(
        ValueError, match=r"--data.label_key label: a number at .*:501, but text at .*a.jsonl:1\."
    ):
        load(path, columns=("input", "label"))
    assert len(load(path)) == 501  # nobody asked for that column


def test_two_datasets_must_agree_on_the_type_of_a_column(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"label": "1"}])
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"a number at .*b.parquet row 1, but text at .*a.jsonl:1"):
        load(f"{tmp_path}/a.jsonl,{tmp_path}/b.parquet", columns=("label",))


BAD_FILES = {
    "no_json.jsonl": (b'{"input": "a"}\n\n{"input": oops}\n', r"no_json.jsonl:3: not JSON: .*oops"),
    "cut.jsonl": (b'{"input": "a"}\n{"input": "b', r"cut.jsonl:2: not JSON"),
    "list.jsonl": (b'["a"]\n', r"list.jsonl:1: a row must be an object .*, not a list"),
    "html.jsonl": (b"<!doctype html>\n<p>404", r"html.jsonl:1: this looks like HTML"),
    "nan.jsonl": (b'{"input": "a", "label": NaN}\n', r"nan.jsonl:1: NaN is not JSON"),
    "latin.jsonl": (b'{"input": "a"}\n{"input": "\xe9"}\n', r"latin.jsonl:2: not UTF-8"),
    "half.jsonl": (b'{"input": "\\ud800"}\n', r"half.jsonl:1: '\\ud800' is half"),
    "empty.jsonl": (b"\n", r"empty.jsonl: it is empty"),
    "empty.json": (b"", r"empty.json: it is empty"),
    "nothing.json": (b"[]", r"nothing.json: it is empty"),
    "object.json": (
        b'{"data": [\n{"input": "a"}]}',
        r"object.json: an object \(keys: data\), not a list of rows",
    ),
    "broken.json": (b'[{"input": "a"},\n{"input" "b"}]', r"broken.json:2: not JSON"),
    "strings.json": (b'[{"input": "a"}, "b"]', r"strings.json row 2: a row must be an object .*, not text"),
    "short.csv": (b"input,label\na,1\nb\n", r"short.csv:3: not readable as CSV: a row must have 2 values"),
    "quote.csv": (b'input,label\na,"1\n', r"quote.csv:2: not readable as CSV"),
    "header.csv": (b"input,label\n", r"header.csv: it is empty"),
    "cut.parquet": (b"PAR1 cut", r"cut.parquet: damaged or not a .parquet file \(8 bytes\)"),
    "cut.arrow": (b"ARROW1 cut", r"cut.arrow: damaged or not a .arrow file"),
    "rows.xml": (b"<a/>", r"rows.xml: a file must end in .jsonl, .json"),
    "script.py": (b"", r"script.py: loading scripts are not run"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_its_line_in_three_lines_at_most(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / name)
    assert str(error.value).startswith(FLAG)
    assert str(error.value).count("\n") <= 2


def test_byte_order_mark_and_blank_lines_are_fine(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\n\n   \n{"input": "b"}')
    rows = load(path)
    assert [row["input"] for row in rows] == ["a", "b"]
    assert rows.origin(1) == f"{path}:4"


def test_quoted_newlines_and_long_values_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f'input\n"one\ntwo"\n{"x" * 200_000}\n')
    rows = load(path)
    assert rows[0]["input"] == "one\ntwo"
    assert len(rows[1]["input"]) == 200_000
    assert rows.origin(1) == f"{path}:4"


def test_a_missing_file_is_reported_with_near_names(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(
        ValueError, match=r"trian.jsonl: there is no such file or folder.\nNear names in .*: train.jsonl"
    ):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(ValueError, match=r"Nor is there a folder"):
        load(tmp_path / "nowhere" / "train.jsonl")


def test_a_hub_name_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"--data.dataset no-such-org/rows: not on this machine, and from the hub"
    ):
        load("no-such-org/rows")
    check_columns("no-such-org/rows", flag=FLAG, required_columns={"--data.input_key": "input"})


def test_commas_and_at_signs_of_existing_paths(tmp_path):
    odd = tmp_path / "a,b@c"
    odd.mkdir()
    write_lines(odd / "x,y.jsonl", ROWS)
    write_lines(tmp_path / "z.jsonl", ROWS[:1])
    assert split_spec(f"{odd}/x,y.jsonl, {tmp_path}/z.jsonl") == [f"{odd}/x,y.jsonl", f"{tmp_path}/z.jsonl"]
    assert len(load(f"{odd}/x,y.jsonl, {tmp_path}/z.jsonl")) == 4
    assert len(load(odd)) == 3


def test_data_dir_is_a_folder_inside(tmp_path):
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "rows.jsonl", ROWS)
    assert len(load(f"{tmp_path}@sub")) == 3
    with pytest.raises(ValueError, match="there is no such file or folder"):
        load(f"{tmp_path}@bus")


def test_splits_of_folders(tmp_path):
    write_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    write_lines(tmp_path / "test.jsonl", ROWS[:1])
    rows = load(tmp_path)
    assert list(rows) == ROWS
    assert rows.origin(2) == f"{tmp_path}/train-00001-of-00002.jsonl:2"
    assert len(load(tmp_path, split="test")) == 1
    with pytest.raises(ValueError, match=r"it has no split 'dev'. Its splits: test, train"):
        load(tmp_path, split="dev")
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)
    )
    saved.save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"it has no split 'dev'. Its splits: test, train"):
        load(tmp_path / "saved", split="dev")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"bare: no .jsonl, .* file in this folder"):
        load(tmp_path / "bare")


def test_concatenation_and_caps(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(4)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(4)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    assert [row["input"] for row in load(both)] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert [row["input"] for row in load(both, max_samples=3)] == ["a0", "a1", "a2"]
    assert [row["input"] for row in load(both, max_samples=3, probs="0.5,0.5")][:3] != ["a0", "a1", "a2"]


def test_mixing_repeats_the_shorter_dataset_until_all_are_used_up(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(300)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(300)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    mixed = [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert len({*mixed}) == 600
    assert sum(text[0] == "a" for text in mixed) / len(mixed) == pytest.approx(0.75, abs=0.05)
    assert mixed == [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert mixed != [row["input"] for row in load(both, probs="0.75,0.25", seed=2)]


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ("1", "1 probabilities for 2 datasets"),
        ("0.5,x", "numbers with commas"),
        ("0.5,0.6", r"add up to 1 \(here 0.4545,0.5455\)"),
        ("0,1", "positive"),
    ],
)
def test_probabilities_that_do_not_fit(tmp_path, probs, message):
    write_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=f"--data.dataset_probs {probs}: .*{message}"):
        load(f"{tmp_path}/a.jsonl,{tmp_path}/a.jsonl", probs=probs)
