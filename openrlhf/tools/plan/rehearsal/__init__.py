"""Rehearses a training run on CPU cores: the same flags and data, with shrunk models and few ranks."""
