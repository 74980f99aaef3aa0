"""Sets what libraries read when they are imported. Every process imports this module first."""

import logging
import os

from openrlhf import cuda_builds

__version__ = "0.1.0"

# One bar for each rank and each file says nothing. The Hugging Face libraries read these when they are
# imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# It recommends a kernel of its hub to every process that has it installed, 4-bit or not.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# It says that Triton has no CPU backend in every process of every engine, before vLLM reads its own settings.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)

cuda_builds.mend()
