"""Compares what a run computes with references."""

COMMANDS = {
    "verify": ("verify", "compare a run's loss, gradient, engine and checkpoints with references"),
}
"""Command -> (module of this folder, summary for `--help`)."""
