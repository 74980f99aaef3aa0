"""Computes recorded runs again, and finds their first difference."""

COMMANDS = {
    "replay": ("replay", "compute a step of a recorded run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first difference between two recorded runs, or two commits"),
}
"""Command -> (module of this folder, summary for `--help`)."""
