"""Seconds of a weight sync, compared with the bandwidth of this machine's memory.

sync    a transformers model's weights go to vLLM engines in Ray actors over gloo, as after a step of
        train_ppo_ray, with checksums, but without the gathering of sharded weights
floor   copying the bytes once for each engine, at the speed at which one core copies a large tensor in the
        same round

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
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from openrlhf.backends.distributed import free_port
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.launch import start_ray
from openrlhf.models.checkpoint_layout import checkpoint_tensors
from openrlhf.tasks.tiny_model import tiny_tokenizer

SHAPES = {1: (128, 4, 512), 50: (512, 10, 32_000), 500: (1536, 12, 64_000)}
"""Hidden size, layers and vocabulary by the approximate number of parameters, in millions."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED = 256 << 20
"""Bytes of the tensor that is copied for the floor: more than caches hold."""


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
        f"{'model':>6} {'dtype':>5} {'engines':>7} {'MB':>7} {'sync, s':>22} {'MB/s':>6} {'sync / floor':>22}"
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
    meeting: dict[str, Any] = {"address": ray.util.get_node_ip_address(), "port": free_port(), "rank": 0}
    bucket_bytes = options.bucket_mb and options.bucket_mb << 20
    sender = WeightSender(
        trainer, RayEngineClient(engines, 1), backend="gloo", bucket_bytes=bucket_bytes, **meeting
    )
    sender.send(0)
    seconds, ratios = [], []
    for version in range(1, options.rounds + 1):
        floor = num_engines * trainer.num_bytes / copies_per_second()
        start = time.perf_counter()
        sender.send(version)
        seconds.append(time.perf_counter() - start)
        ratios.append(seconds[-1] / floor)
    for engine in engines:
        ray.kill(engine)
    mega = trainer.num_bytes / 1e6
    speed = mega * num_engines / statistics.median(seconds)
    told = f"{size:>5}M {dtype:>5} {num_engines:>7} {mega:>7.0f} {spread(seconds):>22} {speed:>6.0f}"
    print(f"{told} {spread(ratios):>22}", flush=True)


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
    actor: Any = ray.remote(VLLMEngine)
    placed = {"runtime_env": {"env_vars": engine_environment(options)}, "num_cpus": 0, "max_concurrency": 8}
    engines = [actor.options(**placed).remote(options) for _ in range(count)]
    ray.get([engine.start.remote() for engine in engines])
    return engines


def copies_per_second() -> float:
    """Returns the bytes that one core copies per second."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    start = time.perf_counter()
    target.copy_(source)
    return COPIED / (time.perf_counter() - start)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


if __name__ == "__main__":
    main()
