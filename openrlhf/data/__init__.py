"""From files and hubs to batches."""

from openrlhf import device as device  # before anything that imports transformers
