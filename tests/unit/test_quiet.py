"""Meaningless output of libraries stays off the screen, whatever a process imports first."""

import os
import subprocess
import sys

PROGRAM = """
import importlib, logging, sys
importlib.import_module("openrlhf")
from huggingface_hub.utils import are_progress_bars_disabled
assert are_progress_bars_disabled()
logging.getLogger("vllm.triton_utils.importing").warning("Triton is installed")
logging.getLogger("vllm.triton_utils.importing").error("an error")
assert not {"torch", "transformers", "ray"} & set(sys.modules)
"""


def test_bars_and_the_remark_on_triton_are_off_before_any_library_is_imported() -> None:
    """A worker of a cluster that somebody else has started gets no variables from the driver."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_HUB_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "an error\n")
