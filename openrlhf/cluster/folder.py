"""The processes of a run work in the folder that it was started in, so that relative paths mean one place."""

import os

VARIABLE = "OPENRLHF_FOLDER"


def here() -> dict[str, str]:
    """For the environment of every process of a run that starts in this folder."""
    return {VARIABLE: os.getcwd()}


def enter() -> None:
    """On a machine that has the folder. Another one needs paths that it has too, and those are absolute."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
