"""Hugging Face models, and what we add to them."""

from openrlhf import device as device  # before anything that imports transformers
