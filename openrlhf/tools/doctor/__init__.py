"""Finds the causes of a run's problems from the files of its folder."""

COMMANDS = {
    "doctor": ("doctor", "examine the installation or a run: causes of problems, evidence, remedies"),
    "explain": ("explain", "explain an error by its code or its text: meaning, causes, remedy"),
}
"""Command -> (module of this folder, summary for `--help`)."""
