"""Runs commands of this project on CPU cores in child processes, and compares their results."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from openrlhf.api import Metrics, RunIndex, run_job

TIMEOUT = 3600.0
"""Seconds after which a run is ended."""
ON_CORES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "RAY_ADDRESS": "local",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "disabled",
}
"""Environment variables of a rehearsed run."""
LINES = 12
"""Maximum number of lines of a log that are shown."""


class RunFailedError(RuntimeError):
    """Raised if a rehearsed run fails. The text has the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A rehearsed run that succeeded."""

    folder: Path
    seconds: float

    @property
    def metrics(self) -> dict[int, Metrics]:
        """Metrics by step."""
        return RunIndex(self.folder / "run").metrics()

    @property
    def model(self) -> Path:
        """Folder of the exported model."""
        return self.folder / "model"


def run_command(
    command: str, flags: Path, folder: Path, *, ranks: int, tick: Callable[[float], None] = lambda s: None
) -> Result:
    """Runs `openrlhf COMMAND --config FLAGS` without GPUs, the user's Ray cluster and the user's cache.
    `tick`: as in `run_job`. Raises RunFailedError."""
    folder.mkdir(parents=True, exist_ok=True)
    log, started = folder / "log.txt", time.monotonic()
    words = ["openrlhf.cli.main", command, "--config", str(flags)]
    environment = os.environ | ON_CORES | {"OPENRLHF_CACHE": str(folder.parent / "cache")}
    with log.open("wb") as file:
        try:
            code = run_job(words, file, ranks=ranks, environment=environment, timeout=TIMEOUT, tick=tick)
        except TimeoutError as error:
            raise RunFailedError(f"it was ended after {TIMEOUT:.0f} s; {_read_end(log)}") from error
    if code:
        raise RunFailedError(f"it ended with code {code}; {_read_end(log)}")
    return Result(folder=folder, seconds=time.monotonic() - started)


def _read_end(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    shown = lines[errors[0] : errors[0] + LINES] if errors else lines[-LINES:]
    return "\n".join([f"the end of {log}:", *shown])


# ---- comparisons

TIMES = ("timing/", "start/", "memory/", "eval/", "mismatch/", "throughput/")
"""Prefixes of metrics that are not compared, because they differ between equal runs."""


COUNTED = ("clip_fraction", "clip_low_fraction", "clip_high_fraction", "masked_fraction")
"""Ends of the names of fractions of actions beyond a limit."""


def differences(
    one: Metrics, other: Metrics, *, relative: float, absolute: float, at_limits: float = 0.0
) -> Mapping[str, str]:
    """Returns metric -> both values, for the common metrics that differ by more than `absolute` + `relative`
    times the larger value. `at_limits`: fraction of the actions that may be so close to a limit that rounding
    decides on which side they are."""
    found = {}
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        if name.startswith(TIMES) or (a != a and b != b):
            continue
        allowed = absolute + relative * max(abs(a), abs(b))
        if name.endswith(COUNTED):
            allowed += at_limits
        if not abs(a - b) <= allowed:
            found[name] = f"{a:.6g} and {b:.6g}"
    return found


def weight_difference(one: Path, other: Path) -> float:
    """Returns the largest difference between the weights of two exported models. Raises ValueError if their
    names or shapes differ."""
    a, b = _weights(one), _weights(other)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        raise ValueError(f"the weights in {one} and {other} have different names or shapes")
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def _weights(folder: Path) -> dict:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
