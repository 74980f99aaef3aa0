"""A rank's files of a checkpoint are listed with their hashes, and a failed write is raised at the end."""

import hashlib
import os
import resource
import signal
from errno import EFBIG, ENOSPC
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from refusals import refused

from openrlhf.checkpoint.manifest import MANIFEST, Manifest
from openrlhf.checkpoint.writer import LARGE, CheckpointWriter
from openrlhf.errors import ErrorCode


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("later", [False, True])
def test_the_manifest_lists_every_file_with_its_content(tmp_path: Path, later: bool) -> None:
    writer = CheckpointWriter(tmp_path, later=later)
    for name in ("a", "b"):
        writer.write(tmp_path / name, lambda file, name=name: file.write(name.encode() * 5))
    state = {"weights": torch.randn(2 * LARGE // 4 + 7), "step": 3}
    writer.save(state, tmp_path / "state")
    writer.finish()
    assert writer.is_done
    found = Manifest.read(tmp_path).files
    contents = {name: (tmp_path / name).read_bytes() for name in ("a", "b", "state")}
    assert (contents["a"], contents["b"]) == (b"aaaaa", b"bbbbb")
    assert found == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }
    loaded = torch.load(tmp_path / "state")
    assert loaded["step"] == 3 and torch.equal(loaded["weights"], state["weights"])


def test_what_is_written_later_is_what_was_there_at_the_call(tmp_path: Path, monkeypatch) -> None:
    """The disk waits until the caller has changed the tensors."""
    go_on = Event()
    monkeypatch.setattr("openrlhf.checkpoint.writer.fault", lambda point: go_on.wait(60))
    writer, weights = CheckpointWriter(tmp_path, later=True), torch.ones(5)
    writer.save({"weights": weights}, tmp_path / "state")
    assert not writer.is_done and not (tmp_path / "state").exists()
    weights.zero_()
    go_on.set()
    writer.finish()
    assert torch.load(tmp_path / "state")["weights"].tolist() == [1.0] * 5


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 100, 3000, 5_000_000])
def test_a_full_disk_is_told_as_the_system_tells_it(tmp_path: Path, later: bool, num_bytes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        writer = CheckpointWriter(tmp_path, later=later)
        writer.save({"weights": torch.randn(2_000_000)}, tmp_path / "state")
        with refused(ErrorCode.NOT_WRITABLE) as told:
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert f"{tmp_path}/state" in told.value.text and os.strerror(EFBIG) in told.value.text


@pytest.mark.parametrize("listed", [True, False], ids=["a file of the manifest", "a file beside it"])
def test_a_failed_write_is_raised_at_the_end_and_later_ones_are_skipped(tmp_path: Path, listed: bool) -> None:
    """Other ranks wait in collectives until then."""

    def fail(*file: object) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    writer = CheckpointWriter(tmp_path)
    (writer.write if listed else writer.attempt)(tmp_path / "a", fail)
    writer.write(tmp_path / "b", lambda file: pytest.fail("written after a failure"))
    with refused(ErrorCode.NOT_WRITABLE, told=(f"{tmp_path}/a", os.strerror(ENOSPC))):
        writer.finish()
    assert not (tmp_path / MANIFEST).exists()
