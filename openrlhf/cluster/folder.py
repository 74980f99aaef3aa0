"""The working directory of a run. All its processes change to the directory in which the run was started, so
that relative paths mean the same everywhere."""

import os

VARIABLE = "OPENRLHF_FOLDER"


def here() -> dict[str, str]:
    """Returns the environment variable with the current directory, for a run's processes."""
    return {VARIABLE: os.getcwd()}


def enter() -> None:
    """Changes to the run's directory if it exists on this machine. Otherwise only absolute paths work."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
