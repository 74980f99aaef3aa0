"""Finds the causes of a run's problems from the files of its folder."""

COMMANDS = {
    "doctor": ("doctor", "examine the installation or a run: causes of problems, evidence, remedies"),
}
"""Command -> (module of this folder, summary for `--help`)."""
