import codecs
import gzip
import json
import os
import pickle
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from openrlhf.config.checks import split_spec
from openrlhf.data import files, outline
from openrlhf.data.bad_rows import read_each, read_value
from openrlhf.data.files import REMEDY
from openrlhf.data.outline import count_rows, first_row
from openrlhf.data.sources import check_columns, load_rows, rows_digest
from openrlhf.errors import ErrorCode

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
    assert first_row(str(tmp_path / name), flag=FLAG) == ROWS[0]
    check_columns(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "input"})


@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_column_names_the_flag_the_columns_and_the_near_one(tmp_path, name):
    WRITERS[name](tmp_path / name)
    for read in (load_rows, check_columns):
        with refused(ErrorCode.MISSING_COLUMN, flag="--data.input_key", value="inptu") as told:
            read(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "inptu"})
        assert told.value.text.splitlines()[1:] == ["Its columns: input, label", "Did you mean input?"]


def test_a_column_of_images_may_begin_behind_the_first_rows(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [ROWS[0]] * 150 + [ROWS[0] | {"images": ["x.png"]}])
    required = {"--data.input_key": "input", "--data.image_key": "images"}
    check_columns(str(file), flag=FLAG, required_columns=required)
    with refused(ErrorCode.MISSING_COLUMN, flag="--data.image_key", value="pictures"):
        check_columns(str(file), flag=FLAG, required_columns=required | {"--data.image_key": "pictures"})


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


LINES = b'{"input": "a"}\n{"input": oops}\n\n["b"]\n{"input": "\xe9"}\n{"input": NaN}\n<p>\n{"input": "c"}\n'
UNREADABLE = {
    "a.jsonl": (LINES, [2, 4, 5], 5),
    "lines.json": (LINES, [2, 4, 5], 5),
    "a.json": (b'[{"input": "a"}, "b", {"input": "c"}]', [2], 1),
    "a.csv": (b"input,n\na,1\nb\nc,2\n", [3], 1),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_rows_are_left_out_and_counted(tmp_path, name, caplog):
    """The first few are logged with their places."""
    content, places, count = UNREADABLE[name]
    path = tmp_path / name
    path.write_bytes(content)
    with refused(ErrorCode.INVALID_ROW, flag=FLAG, value=path, row=places[0], told=REMEDY):
        load(path, columns=("input",))
    check_columns(str(path), flag=FLAG, required_columns={"--data.input_key": "input"}, bad_rows="skip")
    dropped: Counter[str] = Counter()
    rows = load(path, columns=("input",), bad_rows="skip")
    assert [text for _, text in read_each(rows, lambda row: row["input"], "skip", dropped)] == ["a", "c"]
    assert dropped == {"bad row": count}
    logged = [message.partition(": skipped: ")[0] for message in caplog.messages]
    assert logged == [f"{path}:{place}" for place in places]


def test_values_of_a_rarer_type_are_left_out_and_counted(tmp_path, caplog):
    """The first row may have the rarer type, and the count is over all files."""
    write_lines(tmp_path / "a.jsonl", [{"label": 1}, {"label": "2"}])
    write_lines(tmp_path / "b.jsonl", [{"label": "3"}, {"label": None}])
    rows = load(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", columns=("label",), bad_rows="skip")
    dropped: Counter[str] = Counter()
    labels = [label for _, label in read_each(rows, lambda row: row["label"], "skip", dropped)]
    assert labels == ["2", "3", None] and dropped == {"bad row": 1}
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/a.jsonl:1: ") and "'label'" in message


def test_a_column_of_two_types_is_refused_with_both_rows(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [*[{"input": "a", "label": "1"}] * 500, {"input": "a", "label": 1}]
    )
    with refused(ErrorCode.INVALID_ROW, flag="--data.label_key", value="label") as told:
        load(path, columns=("input", "label"))
    assert f"{path}:501" in told.value.text and f"{path}:1." in told.value.text
    assert len(load(path)) == 501  # the column was not asked for


def test_two_datasets_must_agree_on_the_type_of_a_column(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"label": "1"}])
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "b.parquet")
    with refused(ErrorCode.INVALID_ROW, flag="--data.label_key", value="label") as told:
        load(f"{tmp_path}/a.jsonl,{tmp_path}/b.parquet", columns=("label",))
    assert f"{tmp_path}/b.parquet:1" in told.value.text and f"{tmp_path}/a.jsonl:1" in told.value.text


ROW, FILE, ENDING = ErrorCode.INVALID_ROW, ErrorCode.UNREADABLE, ErrorCode.UNSUPPORTED
BAD_FILES = {
    "no_json.jsonl": (b'{"input": "a"}\n\n{"input": oops}\n', ROW, 3, "oops"),
    "cut.jsonl": (b'{"input": "a"}\n{"input": "b', ROW, 2, "JSON"),
    "list.jsonl": (b'["a"]\n', ROW, 1, "a list"),
    "html.jsonl": (b"<!doctype html>\n<p>404", ROW, 1, "HTML"),
    "nan.jsonl": (b'{"input": "a", "label": NaN}\n', ROW, 1, "NaN"),
    "latin.jsonl": (b'{"input": "a"}\n{"input": "\xe9"}\n', ROW, 2, "UTF-8"),
    "half.jsonl": (b'{"input": "\\ud800"}\n', ROW, 1, r"'\ud800'"),
    "deep.jsonl": (b'{"input": "a"}\n{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ROW, 2, "levels"),
    "nested.jsonl": (b'{"input": ' + b'[{"a":' * 60 + b"1" + b"}]" * 60 + b"}\n", ROW, 1, "levels"),
    "deep.json": (b"[" * 100_000, FILE, None, "levels"),
    "digits.jsonl": (b'{"input": "a", "label": ' + b"9" * 10_000 + b"}\n", ROW, 1, "digits"),
    "twice.jsonl": (b'{"input": "a", "input": "b"}\n', ROW, 1, "'input'"),
    "twice.json": (b'[{"input": {"a": 1, "a": 1}}]', FILE, None, "'a'"),
    "empty.jsonl": (b"\n", FILE, None, "empty"),
    "empty.json": (b"", FILE, None, "empty"),
    "nothing.json": (b"[]", FILE, None, "empty"),
    "object.json": (b'{"data": [\n{"input": "a"}]}', FILE, None, "(keys: data)"),
    "broken.json": (b'[{"input": "a"},\n{"input" "b"}]', FILE, 2, "JSON"),
    "strings.json": (b'[{"input": "a"}, "b"]', ROW, 2, "text"),
    "short.csv": (b"input,label\na,1\nb\n", ROW, 3, "2 values"),
    "quote.csv": (b'input,label\na,"1\n', FILE, 2, "CSV"),
    "header.csv": (b"input,label\n", FILE, None, "empty"),
    "cut.parquet": (b"PAR1 cut", FILE, None, "8 bytes"),
    "cut.arrow": (b"ARROW1 cut", FILE, None, "10 bytes"),
    "cut.jsonl.gz": (gzip.compress(b'{"input": "a"}\n')[:-4], FILE, None, "bytes"),
    "torn.csv.gz": (b"\x1f\x8b\x08\x00 torn", FILE, None, "9 bytes"),
    "line.jsonl.gz": (gzip.compress(b'{"input": "a"}\n{"'), ROW, 2, "JSON"),
    "rows.xml.gz": (b"", ENDING, None, ".gz"),
    "rows.xml": (b"<a/>", ENDING, None, ".jsonl, .json"),
    "script.py": (b"", ENDING, None, ".jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_its_row_in_three_lines_at_most(tmp_path, name):
    content, code, row, word = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with refused(code, flag=FLAG, value=tmp_path / name, row=row) as told:
        load(tmp_path / name)
    assert word in told.value.text
    assert str(told.value).count("\n") <= 2


PACKED = {
    "a.jsonl.gz": b'{"input": "a"}\n{"input": "b"}\n',
    "a.json.gz": b'[{"input": "a"}, {"input": "b"}]',
    "a.csv.gz": b"input\na\nb\n",
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_files_are_read_as_what_is_in_them(tmp_path, monkeypatch, name):
    """Packed files may be in a folder, and another file of the same name may take their place."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    path, plain = tmp_path / "rows" / name, tmp_path / name.removesuffix(".gz")
    path.write_bytes(gzip.compress(PACKED[name]))
    plain.write_bytes(PACKED[name])
    for spec in (path, path.parent):
        check_columns(str(spec), flag=FLAG, required_columns={"--data.input_key": "input"})
        rows = load(spec)
        assert [*rows] == [*load(plain)] == [{"input": "a"}, {"input": "b"}]
        assert rows.origin(1) == load(plain).origin(1).replace(str(plain), str(path))
        assert rows.folder(1) == path.parent
    assert rows_digest(str(path), flag=FLAG) == rows_digest(str(plain), flag=FLAG)
    path.write_bytes(gzip.compress(PACKED[name].replace(b"a", b"c")))
    assert rows_digest(str(path), flag=FLAG) != rows_digest(str(plain), flag=FLAG)


def test_a_packed_file_that_has_no_room_unpacked(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"input": "a"}'))
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "file"))
    with refused(ErrorCode.NOT_WRITABLE, flag=FLAG, value=tmp_path / "a.jsonl.gz") as told:
        load(tmp_path / "a.jsonl.gz")
    assert str(tmp_path / "file") in told.value.text and "OPENRLHF_CACHE" in told.value.text


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


def test_a_header_of_csv_names_each_column_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("input,output,output\n1,2,3\n")
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=path, row=1, told="'output' twice"):
        load(path)
    path.write_text(",input,\n0,one,\n")  # without names: an index, and a comma at the end
    assert load(path)[0]["input"] == "one"


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_table_names_each_column_once(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    table = pa.Table.from_arrays([pa.array([text]) for text in "abc"], names=["input", "output", "output"])
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=path) as told:
        load(path)
    assert '"output" exists 2 times' in told.value.text


def test_devices_and_pipes_are_no_datasets(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in ("/dev/null", tmp_path / "pipe.jsonl"):
        with refused(ErrorCode.UNSUPPORTED, flag=FLAG, value=place):
            load(place)


def test_a_missing_file_is_reported_with_near_names(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "trian.jsonl") as told:
        load(tmp_path / "trian.jsonl")
    assert told.value.text.endswith(": train.jsonl")
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told=f"folder {tmp_path / 'nowhere'}"):
        load(tmp_path / "nowhere" / "train.jsonl")


def test_a_hub_name_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value="no-such-org/rows"):
        load("no-such-org/rows")
    check_columns("no-such-org/rows", flag=FLAG, required_columns={"--data.input_key": "input"})


def test_rows_of_the_hub_are_asked_for_as_the_flag_says(monkeypatch):
    asked = []

    def load(name, **options):
        asked.append((name, options))
        return datasets.Dataset.from_list([{"input": name}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for flag in ("org/rows", "org/rows@part/of/it"):
        assert len(load_rows(flag, flag="--data.dataset", required_columns={}, split="test")) == 1
    folders = [None, "part/of/it"]
    assert asked == [("org/rows", {"data_dir": folder, "split": "test"}) for folder in folders]
    digests = [rows_digest(spec, flag=FLAG) for spec in ("org/a", "org/a", "org/b", "org/a,org/b")]
    assert digests[0] == digests[1] and len(set(digests)) == 3


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
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=f"{tmp_path}@bus"):
        load(f"{tmp_path}@bus")


def test_descriptions_of_a_data_set_are_no_rows(tmp_path):
    """As the hub's folders have them, and as `datasets` leaves them out."""
    write_lines(tmp_path / "0000.jsonl", ROWS)
    for name in ("dataset_infos.json", "dataset_info.json", "config.json"):
        (tmp_path / name).write_text('{"default": {"splits": {"train": {"num_examples": 3}}}}')
    assert list(load(tmp_path)) == ROWS


def test_splits_of_folders(tmp_path):
    write_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    write_lines(tmp_path / "test.jsonl", ROWS[:1])
    rows = load(tmp_path)
    assert list(rows) == ROWS
    assert rows.origin(2) == f"{tmp_path}/train-00001-of-00002.jsonl:2"
    assert len(load(tmp_path, split="test")) == 1
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path, told=("'dev'", "test, train")):
        load(tmp_path, split="dev")
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)
    )
    saved.save_to_disk(tmp_path / "saved")
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "saved", told=("'dev'", "test, train")):
        load(tmp_path / "saved", split="dev")
    (tmp_path / "bare").mkdir()
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "bare"):
        load(tmp_path / "bare")


def test_a_split_whose_name_begins_with_that_of_another(tmp_path):
    names = ("train_sft-00000-of-00001", "train_gen-00000-of-00001", "test_sft")
    for i, name in enumerate(names):
        write_lines(tmp_path / f"{name}.jsonl", ROWS[i : i + 1])
    assert [list(load(tmp_path, split=name[:9])) for name in names] == [[row] for row in ROWS]
    assert list(load(tmp_path, split="Train")) == list(load(tmp_path)) == [ROWS[1], ROWS[0]]


def test_each_file_of_a_folder_is_read_once_also_behind_links(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere" / "b.jsonl", ROWS[1:])
    (folder := tmp_path / "rows").mkdir()
    write_lines(folder / "a.jsonl", ROWS[:1])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"input": "packed"}'))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "linked" / "back").symlink_to(folder)
    assert list(load(folder)) == ROWS
    assert "a.jsonl.gz: not read, because a.jsonl is there" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["state.json", "*.arrow", "cut"])
def test_a_damaged_saved_dataset_is_named(tmp_path, damage):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow" if damage == "cut" else damage)
    content = file.read_bytes()
    file.unlink()
    if damage != "*.arrow":
        file.write_bytes(content[:50] if damage == "cut" else b"{}")
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=tmp_path, told="Save the dataset again"):
        load(tmp_path)


def test_a_row_function_may_change_its_row(tmp_path):
    (tmp_path / "own.py").write_text("def own(row):\n    row['input'] += '!'\n    return row\n")
    given = [dict(ROWS[0])]
    rows = load_rows(given, flag=FLAG, required_columns={}, row_func=f"{tmp_path}/own.py:own")
    assert [rows[0]["input"], rows[0]["input"]] == ["a!", "a!"] and given == ROWS[:1]


def test_rows_in_memory_are_those_that_were_chosen_and_files_in_them_stay_encoded():
    file = {"bytes": b"xx", "path": None}
    images, sound = datasets.List({"image": datasets.Image()}), datasets.Audio()
    features = datasets.Features({"input": datasets.Value("string"), "parts": images, "sound": sound})
    rows = [{"input": str(i), "parts": [{"image": file}], "sound": file} for i in range(4)]
    table = pa.Table.from_pylist(rows, schema=features.arrow_schema)
    whole = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
    chosen = whole.select([3, 1])
    for given in (chosen, chosen.with_format("numpy", columns=["input"]), datasets.DatasetDict(train=chosen)):
        assert list(load_rows(given, flag=FLAG, required_columns={})) == [rows[3], rows[1]]
    table = chosen.remove_columns("sound").to_pandas()
    assert next(iter(load_rows(table, flag=FLAG, required_columns={})))["parts"] == rows[3]["parts"]
    with refused(ErrorCode.UNSUPPORTED, told="method map"):
        load_rows(chosen.with_transform(dict), flag=FLAG, required_columns={})
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told="no split"):
        load_rows(datasets.DatasetDict(test=chosen), flag=FLAG, required_columns={})


def test_a_slice_of_a_split_is_refused_where_nothing_reads_it(tmp_path):
    write_lines(tmp_path / "rows.jsonl", ROWS)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told="max_samples"):
        load(tmp_path / "rows.jsonl", split="train[:1]")


def test_a_link_to_nothing_is_no_file_less(tmp_path):
    """As a cache leaves them from which files were removed."""
    write_lines(tmp_path / "train-0.jsonl", ROWS)
    for name in ("train-1.jsonl.gz", "test.jsonl", ".rows.jsonl", "rows.txt"):
        (tmp_path / name).symlink_to("../blobs/1a2b")
    for read in (load, lambda place: rows_digest(str(place), flag=FLAG), check_links):
        with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "train-1.jsonl.gz", told=("1a2b",)):
            read(tmp_path)
    (tmp_path / "train-1.jsonl.gz").unlink()
    assert list(load(tmp_path)) == ROWS  # the links of another split and of other files are not read
    (tmp_path / "train-1.jsonl").symlink_to("train-0.jsonl")
    assert list(load(tmp_path)) == ROWS * 2


def check_links(place):
    check_columns(str(place), flag=FLAG, required_columns={})


def test_files_that_others_count_and_that_are_not_there_are_noted(tmp_path, capsys):
    for name in ("train-00000-of-00003", "train-00002-of-00003", "test-00000-of-00001"):
        write_lines(tmp_path / f"{name}.jsonl", ROWS)
    assert len(load(tmp_path, split="test")) == 3
    assert "are there and read" not in capsys.readouterr().err
    assert len(load(tmp_path)) == 6
    assert f"note: {FLAG} {tmp_path}: 2 of the 3 files of train are there and read" in capsys.readouterr().err


def test_concatenation_and_caps(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(4)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(4)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    assert [row["input"] for row in load(both)] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert [row["input"] for row in load(both, max_samples=3)] == ["a0", "a1", "a2"]
    assert [row["input"] for row in load(both, max_samples=3, probs="0.5,0.5")][:3] != ["a0", "a1", "a2"]


@pytest.mark.processes
def test_mixing_repeats_the_shorter_dataset_until_all_are_used_up(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(300)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(300)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    mixed = [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert len({*mixed}) == 600
    assert sum(text[0] == "a" for text in mixed) / len(mixed) == pytest.approx(0.75, abs=0.05)
    assert mixed == [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert mixed != [row["input"] for row in load(both, probs="0.75,0.25", seed=2)]


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


def test_rows_of_json_lines_stay_on_disk(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input": str(i) * 5000}) + "\n" for i in range(1000, 2000)))
    tracemalloc.start()
    rows = load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 20_000_000 > 20 * peak
    assert rows[999]["input"] == "1999" * 5000


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_rows_of_csv_are_read_in_any_order_and_after_pickling(tmp_path, end, mark):
    path = tmp_path / "a.csv"
    lines = ["input,label", "é,1", "", '"two\nlines, and ""quotes""",2', "", "", "c,3", ""]
    path.write_bytes(mark + end.join(lines).encode())
    rows = pickle.loads(pickle.dumps(load(path)))
    texts = ["é", 'two\nlines, and "quotes"', "c"]
    assert [rows[i]["input"] for i in (2, 0, 1, 2)] == [texts[i] for i in (2, 0, 1, 2)]
    assert [row["label"] for row in rows] == ["1", "2", "3"]


def test_rows_of_csv_stay_on_disk(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("input\n" + "".join(f"{str(i) * 5000}\n" for i in range(1000, 2000)))
    tracemalloc.start()
    rows = load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 20_000_000 > 20 * peak
    assert rows[999]["input"] == "1999" * 5000


def test_broken_rows_of_csv_are_left_out_where_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("input,label\na,1\nb\nc,3,4\nd,4\n")
    rows = load(path, bad_rows="skip")
    dropped = Counter()
    assert [(i, row["input"]) for i, row in read_each(rows, dict, "skip", dropped)] == [(0, "a"), (3, "d")]
    assert dropped == {"bad row": 2}


def test_rows_are_read_in_any_order_and_after_pickling(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "\xc3\xa9"}\r\n\n{"input": "\\ud83d\\ude00"}\n{"input": "c"}')
    rows = pickle.loads(pickle.dumps(load(path)))
    assert [rows[i]["input"] for i in (2, 0, 1, 2)] == ["c", "é", "😀", "c"]
    assert [rows.origin(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:4"]


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    import resource

    for i in range(200):
        write_lines(tmp_path / f"{i:03}.jsonl", [{"input": f"{i}"}])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    are_open = len(os.listdir("/proc/self/fd"))  # tests before this one may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (are_open + 100, hard))
    try:
        assert [row["input"] for row in load(tmp_path)] == [str(i) for i in range(200)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_another_thread_pushes_out_of_the_cache_is_read_to_its_end(tmp_path, monkeypatch):
    read = os.pread
    rows = load(write_lines(tmp_path / "a.jsonl", ROWS))
    monkeypatch.setattr(os, "pread", lambda *place: files._opened.cache_clear() or read(*place))
    assert list(rows) == ROWS


def test_a_file_that_changes_under_the_rows_is_reported(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    rows = load(path)
    write_lines(path, ROWS[:1])
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=path):
        rows[2]
    assert list(load(path)) == ROWS[:1]


NESTED = [{"input": "a", "m": [{"role": "user"}], "n": None}, {"input": None, "m": [], "n": 3}] * 5000


@pytest.fixture
def decoded_on_disk(tmp_path, monkeypatch):
    """Returns the folder that large parquet files are decoded to, and sets a limit that makes every file
    large."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPENRLHF_CACHE", str(folder))
    monkeypatch.setattr("openrlhf.data.files.PARQUET_IN_MEMORY", 0)
    return folder


@pytest.mark.processes
def test_a_large_parquet_file_is_mapped_and_leaves_nothing_behind(tmp_path, decoded_on_disk):
    pq.write_table(pa.Table.from_pylist(NESTED), tmp_path / "a.parquet")
    before = pa.total_allocated_bytes()
    rows = load(tmp_path / "a.parquet")
    assert pa.total_allocated_bytes() - before < 10_000
    assert list(rows) == NESTED
    assert rows.origin(1) == f"{tmp_path}/a.parquet:2"
    assert list(decoded_on_disk.iterdir()) == []


def test_a_large_parquet_file_with_damaged_data(tmp_path, decoded_on_disk):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input": [f"text {i}" for i in range(50_000)]}), path)
    content = bytearray(path.read_bytes())
    content[100:5000] = bytes(4900)
    path.write_bytes(content)
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=path):
        load(path)


def test_no_room_for_a_large_parquet_file(tmp_path, decoded_on_disk):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    decoded_on_disk.write_text("in the way")
    with refused(ErrorCode.NOT_WRITABLE, value=tmp_path / "a.parquet") as told:
        load(tmp_path / "a.parquet")
    assert str(decoded_on_disk) in told.value.text and "OPENRLHF_CACHE" in told.value.text


@pytest.mark.parametrize("name", WRITERS)
def test_the_digest_is_that_of_the_content(tmp_path, name):
    for folder in ("one", "two", "other"):
        (tmp_path / folder).mkdir()
        WRITERS[name](tmp_path / folder / name)

    def digest(folder):
        return rows_digest(str(tmp_path / folder / name), flag=FLAG)

    if (tmp_path / "one" / name).is_file():
        assert digest("one") == digest("two")
    assert digest("one") == digest("one")
    last = max((tmp_path / "other").rglob("*"), key=lambda path: (path.is_file(), path.suffix == ".arrow"))
    last.write_bytes(last.read_bytes() + b" ")
    assert digest("other") != digest("one")


def test_the_digest_knows_the_order_of_files_and_the_split(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS[:1])
    write_lines(tmp_path / "test.jsonl", ROWS[1:])
    files = [f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"]
    specs = [",".join(files), ",".join(files[::-1]), *files]
    assert len({rows_digest(spec, flag=FLAG) for spec in specs}) == 4
    assert rows_digest(str(tmp_path), flag=FLAG) == rows_digest(files[0], flag=FLAG)
    assert rows_digest(str(tmp_path), flag=FLAG, split="test") == rows_digest(files[1], flag=FLAG)


@pytest.mark.parametrize(
    "hidden",
    [
        ".ipynb_checkpoints/rows-checkpoint.jsonl",
        "__pycache__/rows.jsonl",
        "__MACOSX/rows.jsonl",
        "more/.git/rows.jsonl",
        "._rows.jsonl",
        "dataset_infos.json",
    ],
)
def test_files_that_datasets_leaves_out_are_no_rows_of_a_folder(tmp_path, hidden):
    """Unless they are named, or the folder that they are in."""
    write_lines(tmp_path / "rows.jsonl", ROWS)
    before = rows_digest(str(tmp_path), flag=FLAG)
    (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
    write_lines(tmp_path / hidden, ROWS[:1])
    assert len(load(tmp_path)) == 3
    assert len(load(tmp_path.as_uri())) == 3
    assert rows_digest(str(tmp_path), flag=FLAG) == before
    if hidden.endswith(".jsonl"):
        assert len(load(tmp_path / hidden)) == 1
    if "/" in hidden:
        assert (
            len(load((tmp_path / hidden).parent)) == len(load(f"{tmp_path}@{hidden.rpartition('/')[0]}")) == 1
        )


def test_a_file_whose_name_begins_with_two_underscores_is_read_as_datasets_does(tmp_path):
    write_lines(tmp_path / "__rows.jsonl", ROWS)
    assert len(load(tmp_path)) == len(datasets.load_dataset(str(tmp_path), split="train")) == 3


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\n\n"])
def test_an_error_of_a_json_list_quotes_its_line(tmp_path, separator):
    """JSON counts line feeds; also those before the list."""
    text = '[\n{"input": "SEPARATOR",\n "label": "b"},\n{"input": "c" "label": "d"}\n]'
    begin = separator if separator == "\n\n" else ""
    path = tmp_path / "rows.json"
    path.write_text(begin + text.replace("SEPARATOR", "x" if begin else separator), encoding="utf-8")
    with refused(ErrorCode.UNREADABLE, value=path, row=6 if begin else 4) as raised:
        load(path)
    assert raised.value.text.endswith(': {"input": "c" "label": "d"}')


@pytest.mark.parametrize(
    ("name", "row"), [("rows.jsonl", 2), ("rows.json", 2), ("rows.csv", 2), ("head.csv", 1)]
)
def test_a_line_that_no_memory_holds_is_refused(tmp_path, monkeypatch, name, row):
    monkeypatch.setattr("openrlhf.data.files.MAX_ROW", 1000)
    path, long = tmp_path / name, "x" * 2000
    write_lines(path, [ROWS[0], {"input": long}])
    if name.endswith(".csv"):
        path.write_text(f"input,label\n{long},1\n" if name == "rows.csv" else f"input,{long}\n")
    with refused(ErrorCode.UNREADABLE, value=path, row=row):
        load(path)


def test_a_list_larger_than_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    monkeypatch.setattr("os.sysconf", lambda name: 16)
    with refused(ErrorCode.UNREADABLE, value=tmp_path / "rows.json"):  # at most 16 bytes
        load(tmp_path / "rows.json")


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 2**23, 9))  # a ratio of about 1,000
    monkeypatch.setattr("openrlhf.data.gzipped.SMALL", 2**20)
    with refused(ErrorCode.UNREADABLE, value=path, told="more than 200 times its size"):
        load(path)


def test_a_parquet_file_that_declares_more_than_the_disk_has_is_not_decoded(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    monkeypatch.setattr("openrlhf.data.files.PARQUET_IN_MEMORY", 0)
    assert len(load(tmp_path / "rows.parquet")) == 3
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    with refused(ErrorCode.NOT_WRITABLE, value=tmp_path / "rows.parquet"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_type_without_rows_is_refused(tmp_path, ending):
    table = pa.table({"input": pa.array([[("city", "Rome")]], pa.map_(pa.string(), pa.string()))})
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    with refused(ErrorCode.UNREADABLE, value=path):
        load(path)


def test_large_and_encoded_texts_are_texts(tmp_path):
    for array in (pa.array(["a"], pa.large_string()), pa.array(["a"]).dictionary_encode()):
        pq.write_table(pa.table({"input": array}), tmp_path / "rows.parquet")
        assert list(load(tmp_path / "rows.parquet")) == [{"input": "a"}]


def test_a_text_that_no_memory_tokenises_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.data.bad_rows.MAX_TEXT", 10)
    assert read_value({"input": "x" * 10}, "input", str)
    assert read_value({"label": "x" * 11}, "label")
    with refused(ErrorCode.INVALID_ROW):
        read_value({"input": "x" * 11}, "input", str)
