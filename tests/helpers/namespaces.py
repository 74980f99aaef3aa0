"""Tells whether this machine can isolate code in namespaces."""

import os
import subprocess

import pytest

_FLAGS = ["--mount", "--pid", "--net", "--fork", *["--user"] * (os.geteuid() != 0)]
CAN_ISOLATE = subprocess.run(["unshare", *_FLAGS, "true"], stderr=subprocess.DEVNULL).returncode == 0
needs_namespaces = pytest.mark.skipif(
    not CAN_ISOLATE, reason="unshare: nobody makes namespaces on this machine"
)
