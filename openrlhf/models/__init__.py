"""Hugging Face models, extended for packed rows, parallelism and adapters."""

from openrlhf import device as device  # before anything that imports transformers
