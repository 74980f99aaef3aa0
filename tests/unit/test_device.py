"""Choice of a process's GPU; asking for one leaves CUDA usable in forked processes. The code is torch's and
vLLM's; only calls of a driver are replaced."""

import os
import runpy
import shlex
import socket

import pytest
import torch
from refusals import refused

from openrlhf import device
from openrlhf.backends import distributed
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import engine_environment
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.device import visible_index
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised.data_checks import data_notes
from openrlhf.nvidia_smi import gpu_bytes


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Gives the test an environment of its own, like that of a process that has no variables about GPUs."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("VISIBLE_DEVICES")}
    monkeypatch.setattr(os, "environ", own)
    return own


def test_whether_there_is_a_gpu_is_asked_without_starting_cuda(environment, monkeypatch) -> None:
    """A child that is forked after `cudaGetDeviceCount` has no CUDA."""
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    environment.pop("DS_ACCELERATOR", None)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: pytest.fail("CUDA starts"), raising=False)
    assert runpy.run_path(device.__file__)["DEVICE_TYPE"] == "cuda"
    assert environment["DS_ACCELERATOR"] == "cuda"


def test_the_processes_of_an_engine_on_gpus_are_spawned(environment, monkeypatch) -> None:
    from vllm.utils import system_utils

    method = lambda: system_utils.get_mp_context().get_start_method()
    environment.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    assert method() == "fork"  # vLLM's choice for a process that has asked for GPUs
    options = EngineOptions.of(PPOConfig(), model="m", max_len=8, on_gpu=True)
    environment.update(engine_environment(options))
    assert method() == "spawn"


@pytest.mark.parametrize(("ranks", "note"), [("1", "7 GPUs without a rank"), ("7", "1 GPU without a rank")])
def test_a_run_tells_of_gpus_that_it_leaves_idle(environment, monkeypatch, ranks, note) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    environment["WORLD_SIZE"] = ranks  # also set by DeepSpeed's launcher
    config = SFTConfig()
    (told,) = data_notes(config, config.train.batch_size)
    assert told == f"{note}: torchrun --nproc_per_node starts one on each GPU"
    environment["WORLD_SIZE"] = "16"  # on two machines
    assert not [*data_notes(config, config.train.batch_size)]


UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-7a1b0c2d-0000-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("visible", "name", "index"),
    [
        ("", 3, 3),  # all of the node, by a RAY_EXPERIMENTAL_NOSET_* variable
        ("3", "3", 0),  # only its own, as Ray sets it without such a variable
        ("1,3", "3", 1),  # those of `ray start`, of which 3 % 2 and 1 % 2 are the same
        (UUIDS, UUIDS.split(",")[1], 1),
        ("MIG-1f2e,MIG-9a8b", "MIG-1f2e", 0),
    ],
)
@pytest.mark.parametrize("hip", [False, True])
def test_a_gpu_is_found_among_the_visible_ones(environment, monkeypatch, visible, name, index, hip) -> None:
    monkeypatch.setattr(device, "VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES")
    environment[device.VISIBLE_DEVICES] = visible
    assert visible_index(name) == index


@pytest.mark.parametrize(
    ("local_rank", "gpus", "index"), [(0, 1, 0), (3, 1, 0), (3, 8, 3)], ids=["one", "gpus-per-task", "all"]
)
def test_deepspeed_and_torch_take_the_same_gpu(environment, monkeypatch, local_rank, gpus, index) -> None:
    """DeepSpeed uses LOCAL_RANK as it stands, in `comm/torch.py` and `zero/partition_parameters.py`."""
    chosen = []
    monkeypatch.setattr(distributed, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    environment |= {"RANK": "3", "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "8"}
    distributed.init_distributed()
    assert chosen == [index] and environment["LOCAL_RANK"] == str(index)


def test_more_ranks_than_gpus_are_refused(environment, monkeypatch) -> None:
    """NCCL would say "Duplicate GPU detected" in its log, minutes later."""
    monkeypatch.setattr(distributed, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    with refused(ErrorCode.RESOURCES, told="--nproc_per_node 1"):
        distributed.init_distributed()


@pytest.mark.parametrize(
    ("mib", "memory"),
    [(("81559", "24576"), 24576 << 20), (("81559",), 81559 << 20), (("[N/A]",), None), ((), None)],
)
def test_the_memory_of_the_smallest_gpu(tmp_path, environment, mib: tuple, memory: int | None) -> None:
    """`nvidia-smi` reports MiB, one line for each GPU. Some GPUs have no memory of their own."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.join(mib)}\n")
    program.chmod(0o755)
    environment["PATH"] = str(tmp_path)
    assert gpu_bytes() == memory


def test_without_a_driver_nothing_is_known_of_gpus(tmp_path, environment) -> None:
    environment["PATH"] = str(tmp_path)
    assert gpu_bytes() is None


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.processes
def test_ranks_that_do_not_meet_are_told_where_and_why(environment, monkeypatch, rank) -> None:
    """Rank 0 finds the port in use; rank 1 waits for a store that nobody opens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environment |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port)}
        environment.pop("TORCHELASTIC_RUN_ID", None)
        if rank == "1":
            other.close()
        with refused(ErrorCode.CLUSTER) as refusal:
            distributed.init_distributed(timeout_minutes=0.02)
    assert f"rank {rank} of 2" in refusal.value.text and f"127.0.0.1:{port}" in refusal.value.text
