"""Kinds of GPUs with the rates of their data sheets, and clusters described as NODESxGPUSxKIND."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf.api import ErrorCode, UsageError, counted, gpu_bytes, gpu_names

REPORTED = 0.995 * 2**30
"""Bytes of memory per GB in a GPU's name. The driver reports 81,559 MiB for an H100-80GB, 143,771 MiB for an
H200-141GB and 183,359 MiB for a B200-180GB (nvidia-smi)."""

CORE_FLOPS = 32e9
"""FLOP/s of a CPU core in float32: two 256-bit multiply-adds per cycle at 1 GHz, which is half of what
current cores reach in large matrix products."""
CPU_MEMORY_RATE = 20e9
"""Bytes per second that all cores of a machine together read from memory: one channel of DDR4-2666."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of device. Rates are the peaks of the data sheet; rates of links are for one direction."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """FLOP/s of dense bf16 products."""
    memory_rate: float
    """Bytes per second between the device and its memory."""
    link_rate: float
    """Bytes per second to the other devices of the node."""
    host_rate: float
    """Bytes per second to the memory of the host."""
    network_rate: float
    """Bytes per second to other nodes, for each device."""
    mfu: float | None = None
    """Fraction of `flops` that training reaches; None if it was not measured."""
    on_gpu: bool = True


def _gpu(name: str, gb: float, tflops: float, memory: float, link: float, host: float, net: float) -> Kind:
    return Kind(
        name=name,
        memory=gb * REPORTED,
        flops=tflops * 1e12,
        memory_rate=memory * 1e9,
        link_rate=link * 1e9,
        host_rate=host * 1e9,
        network_rate=net * 1e9,
    )


KINDS = (
    #     name, GB, bf16 TFLOP/s, GB/s of memory, NVLink or PCIe, host, network
    _gpu("H100", 80, 989.4, 3350, 450, 64, 50),
    _gpu("H100-NVL", 94, 835, 3900, 300, 64, 50),
    _gpu("H200", 141, 989.4, 4800, 450, 64, 50),
    _gpu("H800", 80, 989.4, 3350, 200, 64, 50),
    _gpu("H20", 96, 148, 4000, 450, 64, 50),
    _gpu("GH200", 96, 989.4, 4000, 450, 450, 50),
    _gpu("B200", 180, 2250, 8000, 900, 64, 50),
    _gpu("B300", 288, 2250, 8000, 900, 64, 100),
    _gpu("GB200", 186, 2500, 8000, 900, 450, 50),
    _gpu("A100", 80, 312, 2039, 300, 32, 25),
    _gpu("A100", 40, 312, 1555, 300, 32, 25),
    _gpu("A800", 80, 312, 2039, 200, 32, 25),
    _gpu("MI300X", 192, 1307.4, 5300, 448, 64, 50),
    _gpu("L40S", 48, 362, 864, 32, 32, 12.5),
    _gpu("L40", 48, 181, 864, 32, 32, 12.5),
    _gpu("L4", 24, 121, 300, 32, 32, 12.5),
    _gpu("A40", 48, 149.7, 696, 32, 32, 12.5),
    _gpu("A10G", 24, 70, 600, 32, 32, 12.5),
    _gpu("A10", 24, 125, 600, 32, 32, 12.5),
    _gpu("RTX4090", 24, 165.2, 1008, 32, 32, 12.5),
    _gpu("RTX3090", 24, 71, 936, 32, 32, 12.5),
)
"""Known GPUs, from the data sheets of NVIDIA and AMD. Networks are those of the vendors' reference systems
with one adapter for each GPU (DGX A100: 200 Gbit/s, DGX H100 and B200: 400 Gbit/s), otherwise 100 Gbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes with the same number of devices of one kind."""

    nodes: int
    per_node: int
    """Number of devices of a node; without GPUs, the number of processes that share its cores."""
    kind: Kind

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def gpus(self) -> list[int]:
        return [self.per_node if self.kind.on_gpu else 0] * self.nodes

    @property
    def gpu(self) -> int | None:
        """Bytes of a GPU's memory; None without GPUs."""
        return int(self.kind.memory) if self.kind.on_gpu else None

    def rate_between(self, devices: int) -> float:
        """Returns the bytes per second at which each of this many devices sends to the others."""
        return self.kind.link_rate if devices <= self.per_node else self.kind.network_rate

    def __str__(self) -> str:
        if not self.kind.on_gpu:
            return f"this machine: {self.kind.name}, {self.kind.memory / 2**30:.0f} GiB"
        gb = f"{self.kind.memory / REPORTED:.0f} GB"
        return f"{self.nodes} x {self.per_node} {self.kind.name} {gb}"


def parse_cluster(text: str) -> Cluster:
    """Parses NODESxGPUSxKIND or GPUSxKIND, such as 8x8xH100-80GB or 8xA100-40GB. If the memory is left out,
    it is that of the first such kind in `KINDS`. Raises UsageError for another form or an unknown kind."""
    pattern = r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})x([A-Za-z][\w-]*?)(?:-(\d+)GB)?"
    match = re.fullmatch(pattern, text.replace(" ", ""), re.IGNORECASE)
    if match is None:
        wrong = "expects NODESxGPUSxKIND or GPUSxKIND, such as 8x8xH100-80GB or 8xA100-40GB"
        raise UsageError(ErrorCode.INVALID_VALUE, wrong, flag="--cluster", value=text)
    nodes, per_node, name, gb = match.groups()
    named = [kind for kind in KINDS if kind.name.casefold() == name.casefold()]
    if not named:
        known = ", ".join(dict.fromkeys(kind.name for kind in KINDS))
        wrong = f"{name} is an unknown GPU; known are {known}"
        raise UsageError(ErrorCode.INVALID_VALUE, wrong, flag="--cluster", value=text)
    memory = None if gb is None else float(gb) * REPORTED
    kind = next((kind for kind in named if kind.memory == memory), named[0])
    if memory is not None:
        kind = replace(kind, memory=memory)
    return Cluster(nodes=int(nodes or 1), per_node=int(per_node), kind=kind)


def this_machine() -> Cluster:
    """Returns the GPUs of this machine, or its cores. A GPU of an unknown kind gets the rates of the first
    one in `KINDS`, with its own memory."""
    if names := gpu_names():
        flat = names[0].replace(" ", "").casefold()
        known = [kind for kind in KINDS if kind.name.replace("-", "").casefold() in flat.replace("-", "")]
        kind = max(known, key=lambda kind: len(kind.name), default=KINDS[0])
        memory = gpu_bytes() or kind.memory
        return Cluster(nodes=1, per_node=len(names), kind=replace(kind, name=names[0], memory=memory))
    return cores(1)


def cores(processes: int) -> Cluster:
    """Returns the cores of this machine, shared by this number of ranks."""
    count = len(os.sched_getaffinity(0))
    kind = Kind(
        name=counted(count, "CPU core"),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops=count * CORE_FLOPS,
        memory_rate=CPU_MEMORY_RATE,
        link_rate=CPU_MEMORY_RATE,
        host_rate=CPU_MEMORY_RATE,
        network_rate=CPU_MEMORY_RATE,
        on_gpu=False,
    )
    return Cluster(nodes=1, per_node=processes, kind=kind)


def with_measured(cluster: Cluster, path: Path) -> Cluster:
    """Replaces rates by measured ones from the gpu_report.json of benchmarks/gpu.py: the memory bandwidth,
    and the MFU of supervised training relative to the data sheet. Raises UsageError if the file is no such
    report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        stages = {stage["stage"]: stage["figures"] for stage in report["stages"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        code = ErrorCode.UNREADABLE if path.exists() else ErrorCode.NOT_FOUND
        text = f"not a report of benchmarks/gpu.py ({error}); run it on a GPU and name its gpu_report.json"
        raise UsageError(code, text, flag="--rates", value=path) from error
    if report.get("rehearsal"):
        text = "a rehearsal on a CPU wrote it, so its figures are not those of a GPU; run it on a GPU"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--rates", value=path)
    changes: dict[str, Any] = {}
    if copied := stages.get("facts", {}).get("copy GB/s, read and written"):
        changes["memory_rate"] = copied * 1e9
    names: Sequence[str] = ("sft-4B-checkpointing", "sft-0.6B-checkpointing", "sft-0.6B")
    shares = (stages.get(name, {}).get("ours MFU, % of the data sheet") for name in names)
    if share := next(filter(None, shares), None):
        changes["mfu"] = share / 100
    return replace(cluster, kind=replace(cluster.kind, **changes))
