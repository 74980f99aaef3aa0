"""A rank's files of a checkpoint are listed with their hashes, and a failed write is raised at the end."""

import hashlib
import os
from errno import ENOSPC
from pathlib import Path

import pytest
import torch.distributed as dist
from refusals import refused

from openrlhf.backends.checkpoint_writer import CheckpointWriter
from openrlhf.backends.manifest import MANIFEST, Manifest
from openrlhf.errors import ErrorCode


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_manifest_lists_every_file_with_its_content(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    for name in ("a", "b"):
        writer.write(tmp_path / name, lambda name=name: (tmp_path / name).write_text(name * 5))
    writer.finish()
    found = Manifest.read(tmp_path).files
    assert {name: entry.sha256 for name, entry in found.items()} == {
        name: hashlib.sha256(name.encode() * 5).hexdigest() for name in ("a", "b")
    }


@pytest.mark.parametrize("listed", [True, False], ids=["a file of the manifest", "a file beside it"])
def test_a_failed_write_is_raised_at_the_end_and_later_ones_are_skipped(tmp_path: Path, listed: bool) -> None:
    """Other ranks wait in collectives until then."""

    def fail() -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    writer = CheckpointWriter(tmp_path)
    (writer.write if listed else writer.attempt)(tmp_path / "a", fail)
    writer.write(tmp_path / "b", lambda: pytest.fail("written after a failure"))
    with refused(ErrorCode.NOT_WRITABLE) as told:
        writer.finish()
    assert f"{tmp_path}/a" in told.value.text and os.strerror(ENOSPC) in told.value.text
    assert not (tmp_path / MANIFEST).exists()
