"""Signal handler for every Python process of a stage, imported at its start: SIGUSR2 makes the process write
the stacks of its threads to a file of its own. The handler needs no GIL, so it answers inside of a call that
hangs, too."""

import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import os
import signal
import sys

with contextlib.suppress(OSError):  # the folder is gone: the process outlived its stage
    _file = open(f"{os.environ['GPUKIT_STACKS']}/{os.getpid()}", "w")  # noqa: SIM115  open to the end
    _file.write(" ".join(sys.orig_argv)[:300] + "\n")
    _file.flush()
    faulthandler.register(signal.SIGUSR2, file=_file, all_threads=True)

_folder = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _folder]
# the machine's own module of this name
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec and _spec.loader:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
