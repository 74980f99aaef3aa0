import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest
from refusals import refused

from openrlhf import files
from openrlhf.data.once import made_once
from openrlhf.errors import ErrorCode, RunError
from openrlhf.files import (
    cache_folder,
    exporting,
    holds_model,
    replacing,
    sync_folder,
    write_atomically,
    writing_to_cache,
)


def failing_parts():
    yield "new"
    raise OSError("disk full")


FULL = ["config.json", "generation_config.json", "model-1-of-2.safetensors", "model.safetensors.index.json"]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
STALE = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
STALE += ["special_tokens_map.json", "added_tokens.json", "reward_statistics.json", "pytorch_model.bin"]
STALE += ["preprocessor_config.json", "model-00002-of-00002.safetensors", "vocab.json"]


@pytest.mark.parametrize("kind", [FULL, ADAPTER], ids=["model", "adapter"])
def test_of_a_model_of_the_other_kind_nothing_is_left(tmp_path, kind):
    """An adapter that was left would be loaded on top of the model beside it, or in its place."""
    others = ["README.md", "tokenizer.py", "vocabulary.txt", "checkpoints", "chat_template.jinja"]
    assert not holds_model(tmp_path) and not holds_model(tmp_path / "gone")
    for name in others:
        (tmp_path / name).touch()
    assert not holds_model(tmp_path)
    with exporting(tmp_path) as made:
        (made / FULL[0]).touch()
    assert set(os.listdir(tmp_path)) == {*others, FULL[0]}  # there was no model whose template it could be
    for name in [*FULL, *ADAPTER, *STALE]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with exporting(tmp_path) as made:
        for name in [*kind, "tokenizer.json"]:
            (made / name).touch()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*others[:-1], *kind, "tokenizer.json"}
    assert holds_model(tmp_path)


def test_a_file_takes_the_place_of_another(tmp_path):
    write_atomically(tmp_path / "file", ["old"])
    write_atomically(tmp_path / "file", iter(["né", "w\n"]))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "néw\n"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("shared", [False, True])
def test_after_a_failure_the_old_file_stays_and_nothing_is_beside_it(tmp_path, shared):
    write_atomically(tmp_path / "file", ["old"])
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "file", failing_parts(), shared=shared)
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_does_not_reach_the_disk_replaces_nothing(tmp_path, monkeypatch, call):
    """The file has been written whole; the failure comes after it."""

    def fails(*_):
        raise OSError("no space left")

    write_atomically(tmp_path / "file", ["old"])
    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[call], fails)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(tmp_path / "file", ["new"])
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_every_file_of_a_folder_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        os, "fsync", lambda number: order.append(Path(f"/proc/self/fd/{number}").readlink().name)
    )
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: order.append("rename") or replace(path, target))
    with replacing(tmp_path / "entry") as beside:
        (beside / "in").mkdir(parents=True)
        (beside / "a").write_text("1")
        (beside / "in" / "b").write_text("2")
    assert sorted(order[:2]) == ["a", "b"] and sorted(order[2:4]) == [".entry.tmp", "in"]
    assert order[4:] == ["rename", tmp_path.name]
    assert (tmp_path / "entry" / "in" / "b").read_text() == "2"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_need_not_reach_the_disk_where_no_folder_does(tmp_path, monkeypatch, number):
    def fails(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError) if number == errno.EIO else nullcontext():
        sync_folder(tmp_path)


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "entry") as beside:
        beside.mkdir()
        (beside / "a").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_goes(tmp_path):
    left = tmp_path / ".entry.tmp"
    left.mkdir()
    (left / "half").write_text("half")
    with replacing(tmp_path / "entry") as beside:
        beside.mkdir()
        (beside / "whole").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["entry", "whole"]


def test_processes_that_write_the_same_file_do_not_share_the_one_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with replacing(path, shared=True) as mine:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomically(path, ["theirs"], shared=True)
        assert path.read_text() == "theirs"
        mine.write_text("mine")
    assert path.read_text() == "mine" and os.listdir(tmp_path) == ["file"]


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("OPENRLHF_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/openrlhf")
    monkeypatch.setenv("OPENRLHF_CACHE", "/data/cache")
    assert cache_folder() == Path("/data/cache")


def test_a_folder_that_several_want_is_made_once_and_whole(tmp_path):
    folder, filled, together = tmp_path / "kept" / "it", [], Barrier(4)

    def fill(beside):
        assert not folder.exists()
        (beside / "file").write_text("whole")
        filled.append(beside)

    def want(_):
        together.wait()
        return (made_once(folder, fill) / "file").read_text()

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(want, range(4))] == ["whole"] * 4
    assert len(filled) == 1 and made_once(folder, fill) == folder and len(filled) == 1


def test_a_folder_that_could_not_be_filled_is_not_there(tmp_path):
    def fail(beside):
        (beside / "half").touch()
        raise ValueError("of the filling")

    with pytest.raises(ValueError, match="of the filling"):
        made_once(tmp_path / "it", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert made_once(tmp_path / "it", lambda beside: (beside / "whole").touch()).is_dir()


def test_what_the_cache_folder_refuses_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "new" / "cache"))
    about = {"flag": "--x", "value": "y"}
    with (
        refused(ErrorCode.NOT_WRITABLE, **about) as told,
        writing_to_cache("not kept in", **about, otherwise=", or z") as folder,
    ):
        assert folder.is_dir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for named in (f"not kept in {tmp_path}/new/cache", os.strerror(errno.ENOSPC), "OPENRLHF_CACHE", ", or z"):
        assert named in told.value.text
    with pytest.raises(OSError, match=r"^damaged$"), writing_to_cache("not kept in"):
        raise OSError("damaged")  # errors that libraries raise about a file have no number


def test_an_export_replaces_the_model_of_its_folder_and_keeps_the_rest(tmp_path):
    for name in [*ADAPTER, "model-2-of-2.safetensors", "config.json"]:
        (tmp_path / name).write_text("old")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".export").mkdir()  # left by a process that was killed
    (tmp_path / ".export" / "half").touch()
    with exporting(tmp_path) as made:
        for name in FULL:
            (made / name).write_text("new")
        (made / "templates").mkdir()
        (made / "templates" / "one").touch()
        assert (tmp_path / "config.json").read_text() == "old"
    assert set(os.listdir(tmp_path)) == {*FULL, "checkpoints", "templates"}
    assert all((tmp_path / name).read_text() == "new" for name in FULL)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error: No space left on device")],
)
def test_an_export_that_fails_leaves_the_model_that_is_there(tmp_path, error):
    for name in FULL:
        (tmp_path / name).write_text("old")
    with pytest.raises(RunError) as told, exporting(tmp_path) as made:
        (made / "config.json").write_text("half")
        raise error
    assert told.value.code is ErrorCode.NOT_WRITABLE
    assert str(tmp_path) in str(told.value) and os.strerror(errno.ENOSPC) in str(told.value)
    assert set(os.listdir(tmp_path)) == set(FULL) and (tmp_path / "config.json").read_text() == "old"


def test_weights_stay_if_the_rest_of_a_model_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("before")
    with pytest.raises(RunError) as told, exporting(tmp_path) as made:
        (made / "model.safetensors").write_text("weights")
        raise TypeError("Object of type Strange is not JSON serializable")
    kept = tmp_path / "unfinished_export"
    assert "TypeError: Object of type Strange" in told.value.text and str(kept) in told.value.text
    assert (kept / "model.safetensors").read_text() == "weights"
    assert (tmp_path / "config.json").read_text() == "before" and not (tmp_path / ".export").exists()
    with pytest.raises(TypeError), exporting(tmp_path):
        raise TypeError("nothing was written")


def test_the_files_of_a_model_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    with exporting(tmp_path) as made:
        (made / "runs").mkdir()
        for name in ("model.safetensors", "config.json", "runs/more"):
            (made / name).touch(mode=0o600)
    (tmp_path / "plain").touch()
    for name in ("model.safetensors", "config.json", "runs/more"):
        assert (tmp_path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_sockets_go_to_a_short_folder_that_can_be_written_to(tmp_path: Path, monkeypatch) -> None:
    """The address of a socket has at most 107 bytes; a run's have up to 79 below this folder."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    closed: list[str] = []
    monkeypatch.setattr(files, "unwritable", lambda place: "closed" if place in closed else None)
    (long := tmp_path / ("x" * 60)).mkdir()
    for place, found in {"/dev": "/dev", str(long): "/tmp", "/no-such-folder": "/tmp"}.items():
        monkeypatch.setenv("TMPDIR", place)
        assert files.socket_folder.__wrapped__() == found
    closed += ["/tmp", "/var/tmp"]
    assert files.socket_folder.__wrapped__() == "/dev/shm"
    closed += ["/dev/shm"]
    with refused(ErrorCode.NOT_WRITABLE, flag="TMPDIR", value="/no-such-folder") as refusal:
        files.socket_folder.__wrapped__()
    assert "/var/tmp, /dev/shm" in refusal.value.text and "Set TMPDIR" in refusal.value.text
