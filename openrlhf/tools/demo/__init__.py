"""A tiny model that is trained on this machine."""

COMMANDS = {
    "demo": ("demo", "train a tiny model on a built-in task, on this machine, in minutes"),
}
"""Command -> (module of this folder, summary for `--help`)."""
