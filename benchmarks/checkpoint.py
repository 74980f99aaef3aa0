"""Cost of the hashes of a checkpoint.

hashed   `CheckpointWriter`, which hashes a file while it writes it
written  the same writer without hashes
floor    `torch.save` of the same tensors to a file, synced to the disk
reading  the check of all hashes before a checkpoint is loaded

Prints seconds, CPU seconds, and their ratios, interleaved in one run.

    python benchmarks/checkpoint.py --mb 832 --files 2 --rounds 5
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from openrlhf.backends.distributed import init_distributed
from openrlhf.checkpoint import writer as writer_module
from openrlhf.checkpoint.manifest import Manifest
from openrlhf.checkpoint.writer import CheckpointWriter


class Times(NamedTuple):
    seconds: float
    cpu: float
    """CPU seconds of all threads of this process."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=832, help="MB of all files (default: 832)")
    parser.add_argument("--files", type=int, default=2, help="number of files (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--folder", type=Path, help="write below this folder (default: the temporary one)")
    options = parser.parse_args()
    init_distributed()
    numel = options.mb * 1_000_000 // options.files // 4
    states = {f"part{i}.pt": torch.randn(numel) for i in range(options.files)}
    ways: dict[str, Callable[[Path], None]] = {
        "floor": lambda folder: write_plainly(states, folder),
        "written": lambda folder: write_unhashed(states, folder),
        "hashed": lambda folder: write(states, folder),
        "reading": check,
    }
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for name, run in ways.items():
                times[name].append(timed(lambda run=run, folder=folder: run(Path(folder))))
    print(f"{options.mb} MB in {options.files} files, {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print(f"{'':<8} {'seconds':>24} {'CPU seconds':>12} {'seconds / written':>24}")
    for name, measured in times.items():
        ratios = [one.seconds / plain.seconds for one, plain in zip(measured, times["written"], strict=True)]
        cpu = statistics.median(one.cpu for one in measured)
        seconds = spread([one.seconds for one in measured])
        print(f"{name:<8} {seconds:>24} {cpu:>12.2f} {spread(ratios):>24}")


def write(states: dict[str, Tensor], folder: Path) -> None:
    writer = CheckpointWriter(folder)
    for name, state in states.items():
        writer.save(state, folder / name)
    writer.finish()


class NoHash:
    def update(self, data: bytes) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def write_unhashed(states: dict[str, Tensor], folder: Path) -> None:
    with patch.object(writer_module, "hashlib", SimpleNamespace(sha256=NoHash)):
        write(states, folder)


def write_plainly(states: dict[str, Tensor], folder: Path) -> None:
    for name, state in states.items():
        with (folder / name).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def check(folder: Path) -> None:
    """Compares all hashes, those of `write` before."""
    if reason := Manifest.read(folder).damage(folder, hashes=True):
        raise RuntimeError(f"the hashes of an intact checkpoint differ: {reason}")


def timed(run: Callable[[], None]) -> Times:
    seconds, cpu = time.perf_counter(), time.process_time()
    run()
    return Times(time.perf_counter() - seconds, time.process_time() - cpu)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


if __name__ == "__main__":
    main()
