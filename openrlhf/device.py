"""What kind of device this machine computes on."""

import os

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

# DeepSpeed asks this variable when it is imported, which transformers does at a time of its own.
os.environ.setdefault("DS_ACCELERATOR", DEVICE_TYPE)
