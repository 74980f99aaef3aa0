"""What kind of device this machine computes on."""

import logging
import os

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

# DeepSpeed asks this variable when it is imported, which transformers does at a time of its own.
os.environ.setdefault("DS_ACCELERATOR", DEVICE_TYPE)

# One bar for each rank and each file says nothing. The Hugging Face libraries read these when they are
# imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# It recommends a kernel of its hub to every process that has it installed, 4-bit or not.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
