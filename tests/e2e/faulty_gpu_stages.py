"""Stages of the GPU kit that fail in every way that a stage can."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpukit.stage import Figures, Setting, Stage

SLEEPER = "import time; print('a child', flush=True); time.sleep(600)"


def good(setting: Setting) -> Figures:
    print("all is well")
    return {"rate": 1.0}


def raises(setting: Setting) -> Figures:
    raise AssertionError("sampler and trainer differ by 0.5 nats")


def hangs_here(setting: Setting) -> Figures:
    """Hangs in a call while a child process in a session of its own sleeps, like the processes of Ray."""
    subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    print("began", flush=True)
    time.sleep(600)
    return {}


def prints_after(setting: Setting) -> Figures:
    atexit.register(lambda: print("[W1 ProcessGroupNCCL] destroy_process_group() was not called"))
    return {"rate": 2.0}


def crashes_after(setting: Setting) -> Figures:
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    return {"rate": 3.0}


def never_exits(setting: Setting) -> Figures:
    atexit.register(lambda: time.sleep(600))
    return {"rate": 4.0}


def is_killed(setting: Setting) -> Figures:
    print("about to need all memory", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves(setting: Setting) -> Figures:
    os._exit(7)


def floods(setting: Setting) -> Figures:
    print("the flood begins")
    for i in range(30):
        print("x" * 2**20, f"line {i}", flush=True)
        time.sleep(0.02)
    return {"rate": 5.0}


def sees_what_was_carried(setting: Setting) -> Figures:
    import carried_along  # pyrefly: ignore[missing-import]  the test writes it

    return {"rate": carried_along.RATE}


def watches_memory_and_raises(setting: Setting) -> Figures:
    """Fails like a run of RL that ends while nvidia-smi is asked every 100 ms."""
    from gpukit.reinforcement import memory_watch

    with memory_watch(Path("memory"), Setting(rehearsal=False)):
        raise AssertionError("exit code 1: openrlhf ppo ...")


def reads_with_a_broken_kernel(setting: Setting) -> Figures:
    """Runs SFT with a packed-attention kernel of another signature."""
    from gpukit.training import train

    from openrlhf.models import attention

    def broken(*args, **named):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'")

    attention.has_varlen_kernel = lambda *args: True
    attention._varlen = broken
    return {**train("ours", ("tiny", 2), setting, False)}


def _stage(work: str, **options) -> Stage:
    return Stage(shows=work, work=f"faulty_gpu_stages:{work}", gpus=0, seconds=1, **options)


STAGES = {
    "raises": _stage("raises"),
    "hangs": _stage("hangs_here", limit=8),
    "hangs-long": _stage("hangs_here", limit=600),
    "prints": _stage("prints_after"),
    "crashes": _stage("crashes_after"),
    "stays": _stage("never_exits", limit=8),
    "killed": _stage("is_killed"),
    "leaves": _stage("leaves"),
    "floods": _stage("floods"),
    "lacks": _stage("good", packages=("a_package_that_nobody_has",)),
    "broken-package": _stage("good", packages=("broken_package",)),
    "nameless-package": _stage("good", packages=("nameless_package",)),
    "carried": _stage("sees_what_was_carried"),
    "no-module": Stage(shows="", work="nowhere:at_all", gpus=0),
    "two-gpus": Stage(shows="", work="faulty_gpu_stages:good", gpus=2),
    "good": _stage("good"),
    "memory": _stage("watches_memory_and_raises", limit=200),
    "broken-kernel": _stage("reads_with_a_broken_kernel", limit=300),
}
