"""Open files, and the commands of programs beside a run, without their processes."""

import fcntl
import os
import subprocess
import sys

import pytest

from openrlhf.cluster import process_reaper
from openrlhf.warm_workers.server import take_files


def test_open_files_get_the_numbers_of_the_process_that_sent_them() -> None:
    """The numbers may be each other's."""
    (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
    first, second = write_a, write_b
    os.close(read_a), os.close(read_b)
    (read_a, one), (read_b, two) = os.pipe(), os.pipe()
    take_files([one, two], [second, first])
    os.write(second, b"a")
    os.write(first, b"b")
    assert (os.read(read_a, 1), os.read(read_b, 1)) == (b"a", b"b")
    for closed in {one, two} - {first, second}:
        with pytest.raises(OSError):
            fcntl.fcntl(closed, fcntl.F_GETFD)
    for number in {first, second, read_a, read_b}:
        os.close(number)


def test_the_reaper_is_a_program_that_imports_nothing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple] = []
    monkeypatch.setattr(
        process_reaper.subprocess, "Popen", lambda command, **options: started.append((command, options))
    )
    process_reaper.start_process_reaper.__wrapped__()
    ((command, options),) = started
    assert command == [sys.executable, "-I", "-S", process_reaper.__file__, str(os.getpid())]
    assert options.pop("start_new_session") is True
    assert options == dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
