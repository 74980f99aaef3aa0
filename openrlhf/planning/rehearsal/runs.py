"""Runs commands of this project on CPU cores as processes of their own, and reads what they wrote."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from openrlhf.backends.distributed import LAUNCHED
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.types import Metrics

TIMEOUT = 3600.0
"""Seconds after which a run is ended."""
LINES = 12
"""Last lines of a log that are shown."""


class RunFailedError(RuntimeError):
    """A rehearsed run ended with an error. Its text has the end of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A rehearsed run that ended well."""

    folder: Path
    seconds: float

    @property
    def metrics(self) -> dict[int, Metrics]:
        """Metrics by step."""
        return read_metrics(self.folder / "run" / "metrics.jsonl")

    @property
    def model(self) -> Path:
        """Folder of the exported model."""
        return self.folder / "model"


def run_command(
    command: str, flags: Path, folder: Path, *, ranks: int, tick: Callable[[float], None] = lambda s: None
) -> Result:
    """Runs `openrlhf COMMAND --config FLAGS` and returns its result. Several ranks meet as under a launcher.
    `tick` is called with the seconds since the start, about once a second. Raises RunFailedError."""
    folder.mkdir(parents=True, exist_ok=True)
    log, started = folder / "log.txt", time.monotonic()
    words = [sys.executable, "-m", "openrlhf.cli.main", command, "--config", str(flags)]
    with _processes(words, log, ranks, folder.parent) as group:
        while any(process.poll() is None for process in group):
            seconds = time.monotonic() - started
            if any(process.poll() for process in group):  # the other ranks would wait for the failed one
                break
            if seconds > TIMEOUT:
                raise RunFailedError(f"it was ended after {TIMEOUT:.0f} s; {_end_of(log)}")
            tick(seconds)
            time.sleep(0.2)
        codes = [process.poll() for process in group]
    if any(codes):
        code = next(filter(None, codes))
        raise RunFailedError(f"it ended with code {code}; {_end_of(log)}")
    return Result(folder=folder, seconds=time.monotonic() - started)


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    shown = lines[errors[0] : errors[0] + LINES] if errors else lines[-LINES:]
    return "\n".join([f"the end of {log}:", *shown])


@contextmanager
def _processes(words: Sequence[str], log: Path, ranks: int, home: Path) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes of a run, each with a process group of its own, and kills what is left of them."""
    common = _environment(home)
    if ranks > 1:
        # This process has the store in which ranks meet, as torchrun does. A port that rank 0 opened seconds
        # later might be taken by then.
        store = _store()
        common |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "rehearsal",
        }
    group: list[subprocess.Popen] = []
    try:
        with log.open("wb") as file:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                group.append(
                    subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=common | place,
                        start_new_session=True,
                    )
                )
        yield group
    finally:
        for process in group:
            _end(process)


def _store() -> TCPStore:
    """Returns a store of this process that listens on loopback alone."""
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach()
    )


def _environment(home: Path) -> dict[str, str]:
    """Returns the variables of a rehearsed run: without GPUs, without the user's Ray cluster and cache."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "RAY_ADDRESS": "local",
        "OPENRLHF_CACHE": str(home / "cache"),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }


PATIENCE = 10.0
"""Seconds that a run has to end its own processes after SIGTERM."""


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()  # bounded: SIGKILL has ended it


# ---- comparisons

TIMES = ("timing/", "start/", "memory/", "eval/", "mismatch/", "throughput/")
"""Beginnings of the names of metrics that differ between equal runs, or that only one of them has."""


def differences(one: Metrics, other: Metrics, *, relative: float, absolute: float) -> Mapping[str, str]:
    """Returns the metrics that both runs have and that differ by more than `absolute` plus `relative` of the
    larger one, with both values."""
    found = {}
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        if name.startswith(TIMES) or (a != a and b != b):
            continue
        if not abs(a - b) <= absolute + relative * max(abs(a), abs(b)):
            found[name] = f"{a:.6g} and {b:.6g}"
    return found


def weight_difference(one: Path, other: Path) -> float:
    """Returns the largest difference between the weights of two exported models. Raises ValueError if they
    have other names or shapes."""
    a, b = _weights(one), _weights(other)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        raise ValueError("the two exported models have other weights")
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def _weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
