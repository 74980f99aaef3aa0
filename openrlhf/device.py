"""What kind of device this machine computes on."""

import os

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

# DeepSpeed asks this variable when it is imported, which transformers does at a time of its own.
os.environ.setdefault("DS_ACCELERATOR", DEVICE_TYPE)

# One bar for each rank and each file says nothing. The Hugging Face libraries read these when they are
# imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
