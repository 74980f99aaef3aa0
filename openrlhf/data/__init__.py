"""Datasets: reads rows from files and hubs, tokenises them and packs them into batches."""

from openrlhf import device as device  # before anything that imports transformers
