"""Datasets at URLs are fetched once and read as files of this machine."""

import gzip
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import fsspec
import pytest
from refusals import refused

from openrlhf.data import remote
from openrlhf.data.sources import check_columns, load_rows, rows_digest
from openrlhf.errors import ErrorCode

FLAG = "--data.dataset"
ROWS = [{"input": "a"}, {"input": "b"}]
COLUMNS = {"--data.input_key": "input"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def load(spec, **options):
    return load_rows(spec, flag=FLAG, required_columns=COLUMNS, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Returns the folder that files are fetched to; tries follow each other without waits."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    look_again()
    return tmp_path / "cache" / "downloads"


def look_again():
    """Makes the process look URLs up again, which it does only once."""
    remote._listing.cache_clear()


@pytest.fixture
def bucket():
    """Starts a store of objects with the interface of S3."""
    files = fsspec.filesystem("memory")
    yield lambda path, data: files.pipe_file(path, data)
    files.store.clear()
    files.pseudo_dirs[:] = [""]


class Site:
    """Web server with one file."""

    def __init__(self):
        self.data, self.etag = lines(ROWS), '"1"'
        self.status, self.failures, self.cut = 200, 0, 0
        self.asked = Counter()
        self.encoding = None
        self.has_ranges = True
        self.sent: list[int] = []
        """Bytes that each GET was answered with."""

    def __enter__(self):
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer()

            def do_GET(self):
                wanted = self.headers.get("Range", "bytes=0-") if site.has_ranges else "bytes=0-"
                first, last = wanted.removeprefix("bytes=").split("-")
                part = site.data[int(first) : int(last or len(site.data)) + 1]
                if self.answer(int(first), len(part)):
                    site.sent.append(len(part) - site.cut)
                    self.wfile.write(part[: len(part) - site.cut])
                    site.cut = 0

            def answer(self, first=0, length=None):
                site.asked[self.command] += 1
                failing = site.failures > 0
                site.failures -= failing
                status = 503 if failing else site.status
                self.send_response(206 if status == 200 and first else status)
                length = len(site.data) if length is None else length
                self.send_header("Content-Length", str(length if status == 200 else 0))
                if first:
                    place = f"{first}-{first + length - 1}/{len(site.data)}"
                    self.send_header("Content-Range", f"bytes {place}")
                if site.etag:
                    self.send_header("ETag", site.etag)
                if site.encoding:
                    self.send_header("Content-Encoding", site.encoding)
                self.end_headers()
                return status == 200

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=[0.02], daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/rows.jsonl"
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site():
    with Site() as site:
        yield site


def test_a_file_is_fetched_once_and_checked_digested_and_read(site, cache, tmp_path):
    check_columns(site.url, flag=FLAG, required_columns=COLUMNS)
    rows = load(site.url)
    assert list(rows) == ROWS
    assert rows.origin(1) == f"{site.url}:2"
    assert rows.folder(1) is None
    here = tmp_path / "rows.jsonl"
    here.write_bytes(lines(ROWS))
    assert rows_digest(site.url, flag=FLAG) == rows_digest(str(here), flag=FLAG)
    assert site.asked == {"HEAD": 1, "GET": 1}
    look_again()
    assert list(load(site.url)) == ROWS
    assert site.asked == {"HEAD": 2, "GET": 1}
    assert [path.name for path in cache.rglob("*.tmp")] == []


def test_a_file_that_changed_is_fetched_anew_and_readers_of_the_old_one_go_on(site):
    old = load(site.url)
    site.data, site.etag = lines([{"input": "c"}]), '"2"'
    assert list(load(site.url)) == ROWS  # one version for the whole process
    look_again()
    assert list(load(site.url)) == [{"input": "c"}]
    assert list(old) == ROWS


def test_a_server_that_fails_is_asked_again(site, capsys):
    site.failures = 3  # both ways to look the file up fail, and one to look it up again
    assert list(load(site.url)) == ROWS
    said = capsys.readouterr().err
    assert f"{FLAG} {site.url}: " in said and "503" in said


def test_a_download_that_breaks_off_is_begun_again_and_never_read(site, cache):
    site.cut = 5
    assert list(load(site.url)) == ROWS
    assert site.asked["GET"] == 2
    (copy,) = cache.rglob("*.jsonl")
    assert copy.read_bytes() == lines(ROWS)


@pytest.mark.parametrize(
    ("has_ranges", "changes", "sent"),
    [(True, False, [20]), (True, True, [30]), (False, False, [30, 30])],
    ids=["goes on", "has changed", "sends only whole files"],
)
def test_a_download_goes_on_where_the_last_try_ended(site, tmp_path, has_ranges, changes, sent):
    (file,) = remote._look_up_whole(site.url).files.values()
    target = tmp_path / "rows.jsonl"
    target.write_bytes(site.data[:10])
    site.has_ranges = has_ranges
    if changes:
        site.data, site.etag = lines([{"input": "c"}, {"input": "d"}]), '"2"'
    remote._fetch(site.url, file, target)
    assert target.read_bytes() == site.data and site.sent == sent


def test_a_download_from_a_bucket_goes_on_where_the_last_try_ended(bucket, tmp_path, monkeypatch):
    bucket("/b/rows.jsonl", lines(ROWS))
    (file,) = remote._look_up_whole("memory://b/rows.jsonl").files.values()
    target = tmp_path / "rows.jsonl"
    target.write_bytes(lines(ROWS)[:10])
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", None)
    remote._fetch("memory://b/rows.jsonl", file, target)
    assert target.read_bytes() == lines(ROWS)


def test_fewer_bytes_than_were_promised_are_an_error(bucket, monkeypatch, cache):
    bucket("/b/rows.jsonl", lines(ROWS))
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "get_file", lambda self, path, target, **_: open(target, "wb").close())
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value="memory://b/rows.jsonl") as told:
        load("memory://b/rows.jsonl")
    assert "3 times" in told.value.text and f"0 of {2 * 15} bytes" in told.value.text
    assert not [*cache.rglob("*.jsonl")]


@pytest.mark.parametrize(
    ("status", "tries", "code", "name"),
    [
        (404, 2, ErrorCode.NOT_FOUND, ""),
        (403, 2, ErrorCode.UNREADABLE, "403"),
        (500, 6, ErrorCode.UNREADABLE, "500"),
    ],
)
def test_a_url_that_cannot_be_fetched_is_named(site, status, tries, code, name):
    site.status = status
    for read in (load, lambda url: check_columns(url, flag=FLAG, required_columns=COLUMNS)):
        with refused(code, flag=FLAG, value=site.url, told=name):
            read(site.url)
    assert site.asked.total() == 2 * tries  # each with HEAD and GET


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_a_packed_file_is_read_also_where_http_unpacks_it_on_the_way(site, encoding):
    site.data, site.encoding = gzip.compress(lines(ROWS)), encoding
    check_columns(f"{site.url}.gz", flag=FLAG, required_columns=COLUMNS)
    rows = load(f"{site.url}.gz")
    assert list(rows) == ROWS and rows.origin(1) == f"{site.url}.gz:2"


def test_packed_files_of_a_bucket(bucket):
    bucket("/rows/train.jsonl.gz", gzip.compress(lines(ROWS)))
    bucket("/rows/test.jsonl.gz", gzip.compress(lines(ROWS[:1])))
    assert list(load("memory://rows")) == ROWS
    assert list(load("memory://rows", split="test")) == ROWS[:1]


def test_without_a_connection_the_last_copy_is_read_and_named(site, capsys, cache):
    load(site.url)
    site.data, site.etag = lines([{"input": "c"}]), '"2"'
    look_again()
    load(site.url)
    site.close()
    look_again()
    assert list(load(site.url)) == [{"input": "c"}]
    said = capsys.readouterr().err
    assert f"{FLAG} {site.url}: failed 3 times" in said and str(cache) in said
    with refused(ErrorCode.UNREADABLE, flag=FLAG):
        load(site.url.replace("rows", "others"))


def test_a_bad_row_names_url_and_line(site):
    site.data += b"{"
    with refused(ErrorCode.INVALID_ROW, flag=FLAG, value=site.url, row=3):
        load(site.url)


def test_the_folder_of_a_bucket(bucket):
    bucket("/b/data/train/a.jsonl", lines(ROWS))
    bucket("/b/data/train/b.csv", b"input\nc\n")
    bucket("/b/data/test.jsonl", lines([{"input": "t"}]))
    bucket("/b/data/README.md", b"no rows")
    rows = load("memory://b/data")
    assert list(rows) == [*ROWS, {"input": "c"}]
    assert rows.origin(2) == "memory://b/data/train/b.csv:2"
    assert list(load("memory://b/data/", split="test")) == [{"input": "t"}]
    assert list(load("memory://b@data/train, memory://b/data/test.jsonl", max_samples=3)) == [
        *ROWS,
        {"input": "c"},
    ]
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value="memory://b/data", told=("'dev'", "test, train")):
        load("memory://b/data", split="dev")
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value="memory://b@nowhere"):
        load("memory://b@nowhere")


def test_only_files_of_the_split_are_fetched(bucket, cache):
    bucket("/b/train.jsonl", lines(ROWS))
    bucket("/b/test.jsonl", lines(ROWS))
    load("memory://b")
    assert [path.name for path in cache.rglob("*.jsonl")] == ["train.jsonl"]


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_saved_dataset_in_a_bucket(bucket, tmp_path, monkeypatch, has_splits):
    saved = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict(train=saved) if has_splits else saved).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "saved").rglob("*"):
        if path.is_file():
            bucket(f"/b/{path.relative_to(tmp_path)}", path.read_bytes())
    rows = load("memory://b/saved")
    assert list(rows) == ROWS
    assert rows.origin(0) == f"memory://b/saved{'/train' * has_splits}:1"
    check_columns("memory://b/saved", flag=FLAG, required_columns=COLUMNS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "file"))
    with refused(ErrorCode.NOT_WRITABLE, flag=FLAG, value="memory://b/saved"):
        load("memory://b/saved")


def test_names_that_lead_out_of_the_cache_are_refused(monkeypatch, cache):
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "info", lambda self, path, **_: {"type": "directory"})
    monkeypatch.setattr(files, "find", lambda self, path, **_: {"/b/../../x.jsonl": {"size": 1}})
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value="memory://b", told="../../x.jsonl"):
        load("memory://b")


@pytest.mark.parametrize(
    ("url", "code", "name"),
    [
        ("s3://bucket/rows.jsonl", ErrorCode.MISSING_PACKAGE, "pip install s3fs"),
        ("gs://bucket/rows.jsonl", ErrorCode.MISSING_PACKAGE, "pip install gcsfs"),
        ("nonsense://rows.jsonl", ErrorCode.UNSUPPORTED, "nonsense"),
        ("http://localhost/rows.txt", ErrorCode.UNSUPPORTED, ".jsonl, .json, .csv, .parquet, .arrow"),
    ],
)
def test_addresses_that_nothing_reads(url, code, name):
    with refused(code, flag=FLAG, value=url, told=name):
        load(url)


def test_a_cache_folder_that_cannot_be_written(site, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "file"))
    with refused(ErrorCode.NOT_WRITABLE, flag=FLAG, value=site.url) as told:
        load(site.url)
    assert str(tmp_path / "file") in told.value.text and "OPENRLHF_CACHE" in told.value.text
