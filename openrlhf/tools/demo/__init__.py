"""A small model that is trained on this machine."""

COMMANDS = {
    "demo": ("demo", "train a small model on a built-in task, on this machine, in minutes"),
}
"""Command -> (module of this folder, summary for `--help`)."""

TINY = "tiny"
"""Model of the demo that starts from random weights."""
MODELS = (TINY, "smollm2")
