import codecs
import gzip
import json
import os
import pickle
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from row_files import FLAG, ROWS, WRITERS, load, write_lines

from openrlhf.data import files
from openrlhf.data.bad_rows import read_each
from openrlhf.data.files import REMEDY
from openrlhf.data.outline import first_row
from openrlhf.data.sources import check_columns, rows_digest
from openrlhf.errors import ErrorCode


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = load(tmp_path / name, columns=("input", "label"))
    assert list(rows) == ROWS
    assert first_row(str(tmp_path / name), flag=FLAG) == ROWS[0]
    check_columns(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "input"})


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


@pytest.mark.parametrize(
    ("name", "head", "line"), [("a.jsonl", "", '{{"input": "{}"}}'), ("a.csv", "input", "{}")]
)
def test_rows_stay_on_disk(tmp_path, name, head, line):
    path = tmp_path / name
    lines = [head] * bool(head) + [line.format(str(i) * 5000) for i in range(1000, 2000)]
    path.write_text("\n".join(lines))
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
