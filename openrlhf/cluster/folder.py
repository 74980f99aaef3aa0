"""Working directory of a run: its processes work in the folder it was started in, so that relative paths name
the same place everywhere."""

import os

VARIABLE = "OPENRLHF_FOLDER"


def here() -> dict[str, str]:
    """Returns the variable that tells a run's processes this folder."""
    return {VARIABLE: os.getcwd()}


def enter() -> None:
    """Changes to the run's folder if this machine has it. On other machines only absolute paths work."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
