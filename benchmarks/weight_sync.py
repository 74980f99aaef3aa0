"""Seconds of a weight sync, compared with the bandwidth of this machine's memory.

sync    a transformers model's weights go to vLLM engines in Ray actors, as after a step of train_ppo_ray
        without a GPU, with checksums, but without the gathering of sharded weights
over    memory: engines share memory with the trainer; tcp: as if they were on another machine
floor   copying the bytes once for each engine, at the speed at which one core copies a large tensor in the
        same round
copies  CPU time of the trainer and the engines, divided by the CPU time of the floor: how many copies of the
        bytes cost as much as the sync. It depends less on the load than seconds do

    python benchmarks/weight_sync.py --sizes 1 50 500 --dtypes fp32 bf16 --engines 1 2
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import psutil
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from openrlhf.backends.distributed import free_port
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.shared_memory import SharedMemory
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.launch import start_ray
from openrlhf.models.checkpoint_layout import checkpoint_tensors
from openrlhf.tasks.tiny_model import tiny_tokenizer

SHAPES = {1: (128, 4, 512), 50: (512, 10, 32_000), 500: (1536, 12, 64_000)}
"""Hidden size, layers and vocabulary by the approximate number of parameters, in millions."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNSEEN = ["/proc/0/fd/0", "memory of another machine"]
COPIED = 256 << 20
"""Bytes of the tensor that is copied for the floor: more than caches hold."""


class Times(NamedTuple):
    """Seconds on the clock and CPU time of this process."""

    seconds: float
    cpu: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Times") -> "Times":
        return Times(self.seconds - other.seconds, self.cpu - other.cpu)


class Sync(NamedTuple):
    """Measurements of a weight sync."""

    seconds: float
    floors: float
    """Seconds, divided by those of the floor."""
    copies: float
    """CPU time of trainer and engines, divided by that of the floor."""
    of_the_trainer: float
    """The trainer's part of `copies`."""


class MeasuredEngine(VLLMEngine):
    def cpu_seconds(self) -> float:
        """Returns the CPU time of the engine's processes."""
        own = psutil.Process()
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(t.user + t.system for t in times)


class Trainer:
    """Training engine as a weight sender sees it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = {name: t.detach() for name, t in checkpoint_tensors(model).items()}

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]


def main() -> None:
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    start_ray()
    print(f"load {os.getloadavg()[0]:.1f}; median, smallest and largest of {options.rounds} rounds")
    print(
        f"{'model':>6} {'dtype':>5} {'engines':>7} {'MB':>7} {'sync, s':>22} {'over':>6} {'sync / floor':>22}"
        f" {'copies':>22} {'of the trainer':>22}"
    )
    for size in options.sizes:
        for dtype in options.dtypes:
            for num_engines in options.engines:
                with tempfile.TemporaryDirectory() as folder:
                    report(options, size, dtype, num_engines, Path(folder))
    ray.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[1, 50],
        choices=SHAPES,
        help="parameters of the models, in millions",
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument("--engines", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--bucket_mb", type=int, default=None, help="bucket size in MB, as --vllm.sync_bucket_mb"
    )
    return parser.parse_args()


def report(options: argparse.Namespace, size: int, dtype: str, num_engines: int, folder: Path) -> None:
    trainer = Trainer(model_of(size, dtype, folder))
    engines = start_engines(num_engines, dtype, folder)
    found: dict[str, list[Sync]] = {"memory": [], "tcp": []}
    for _, way in product(range(options.rounds), found):
        with patch.object(SharedMemory, "address", UNSEEN) if way == "tcp" else nullcontext():
            sender = connected(trainer, engines, options.bucket_mb)
        sender.send(0)  # takes memory
        found[way].append(measure(sender, trainer, engines))
    for engine in engines:
        ray.kill(engine)
    mega = trainer.num_bytes / 1e6
    for way, syncs in found.items():
        seconds, *ratios = (list(column) for column in zip(*syncs, strict=True))
        told = f"{size:>5}M {dtype:>5} {num_engines:>7} {mega:>7.0f} {spread(seconds):>22} {way:>6}"
        print(told, *(f"{spread(ratio):>22}" for ratio in ratios), flush=True)


def connected(trainer: Trainer, engines: list[Any], bucket_mb: int | None) -> WeightSender:
    source: Any = trainer  # has what a sync calls of a TrainedRank
    meeting: dict[str, Any] = {"address": ray.util.get_node_ip_address(), "port": free_port(), "rank": 0}
    bucket_bytes = bucket_mb and bucket_mb << 20
    return WeightSender(
        source, RayEngineClient(engines, 1), backend="gloo", bucket_bytes=bucket_bytes, **meeting
    )


def measure(sender: WeightSender, trainer: Trainer, engines: list[Any]) -> Sync:
    def cpu_of_engines() -> float:
        return sum(ray.get([e.cpu_seconds.remote() for e in engines]))

    floor = Times(*(len(engines) * trainer.num_bytes * t for t in time_of_a_byte()))
    engines_start, start = cpu_of_engines(), Times.now()
    sender.send(1)
    sync = Times.now() - start
    of_engines = cpu_of_engines() - engines_start
    return Sync(
        seconds=sync.seconds,
        floors=sync.seconds / floor.seconds,
        copies=(sync.cpu + of_engines) / floor.cpu,
        of_the_trainer=sync.cpu / floor.cpu,
    )


def model_of(size: int, dtype: str, folder: Path) -> PreTrainedModel:
    """Builds an untrained model, and writes what an engine needs to start to `folder`."""
    hidden, layers, vocabulary = SHAPES[size]
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])


def start_engines(count: int, dtype: str, folder: Path) -> list[Any]:
    options = EngineOptions(
        model=str(folder),
        dtype=dtype,
        max_len=128,
        seed=0,
        transfer_backend="gloo",
        on_gpu=False,
        load_weights=False,
    )
    actor: Any = ray.remote(MeasuredEngine)
    placed = {"runtime_env": {"env_vars": engine_environment(options)}, "num_cpus": 0, "max_concurrency": 8}
    engines = [actor.options(**placed).remote(options) for _ in range(count)]
    ray.get([engine.start.remote() for engine in engines])
    return engines


def time_of_a_byte() -> Times:
    """Returns the time in which one core copies a byte."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    start = Times.now()
    target.copy_(source)
    return Times(*(t / COPIED for t in Times.now() - start))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


if __name__ == "__main__":
    main()
