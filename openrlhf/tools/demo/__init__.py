"""A small model that is trained on this machine."""

TINY = "tiny"
"""Model of the demo that starts from random weights."""
MODELS = (TINY, "smollm2")
