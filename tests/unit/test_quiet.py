"""Meaningless output of libraries stays off the screen, and their idle threads off the cores, whatever a
process imports first."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(("own", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(own: dict[str, str], expected: str) -> None:
    """With two threads on two busy cores, spinning makes a token of SmolLM2 take 2 seconds, not 0.04. torch
    reads the variable when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | own
    program = "import openrlhf, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{expected} False\n"
