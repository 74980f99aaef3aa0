"""Two engines of a cluster, one of which is killed while weights are under way; reports what becomes of the
other."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import ray
import torch
from sending import Trainer, differences, options_of
from torch import Tensor
from transformers import AutoTokenizer

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.engine import VLLMEngine, engine_environment
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.stored_weights import build_probe
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.launch import start_ray


class EngineActor(VLLMEngine):
    def pid(self) -> int:
        return os.getpid()

    async def version(self) -> str:
        return await self.llm.get_weight_version()


class Killing(Trainer):
    """Trainer that kills a process halfway through sending its weights."""

    victim: psutil.Process | None = None

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        tensors = list(super().weights(bucket_bytes, part))
        for i, named in enumerate(tensors):
            if self.victim is not None and i == len(tensors) // 2:
                self.victim.send_signal(signal.SIGKILL)
            yield named


def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Killing(spec["model"], "fp32")
    options = options_of(spec["model"])
    # a cluster of its own, in which a core is a child of its engine
    os.environ |= {"RAY_ADDRESS": "local", "OPENRLHF_WARM_WORKERS": "0"}
    start_ray()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(EngineActor).options(
        num_cpus=0, runtime_env={"env_vars": engine_environment(options)}, max_concurrency=16
    )
    engines = [actor.remote(options) for _ in range(2)]
    ray.get([engine.start.remote() for engine in engines])
    client = RayEngineClient(engines, 1)
    meeting = {"address": ray.util.get_node_ip_address(), "port": free_port(), "rank": 0}
    sender = WeightSender(trainer, client, backend="gloo", bucket_bytes=1 << 10, **meeting)
    sender.send(1)
    trainer.learn()
    process = psutil.Process(ray.get(engines[spec["dies"]].pid.remote()))
    # The process to kill is the engine's actor, or the process that computes for it and that runs out of
    # memory.
    (core,) = (p for p in process.children() if "EngineCore" in " ".join(p.cmdline()))
    trainer.victim = core if spec["process"] == "core" else process
    started, told = time.monotonic(), ""
    try:
        sender.send(2)
    except EnginesFailedError as error:
        told = str(error)
    seconds = time.monotonic() - started
    survivor = engines[1 - spec["dies"]]
    probe = build_probe(AutoTokenizer.from_pretrained(spec["model"]), 128)
    log_probs = ray.get(survivor.probe.remote(probe)).log_probs
    found = {
        "told": told,
        "seconds": seconds,
        "version": ray.get(survivor.version.remote()),
        "difference": max(differences(trainer.policy, probe, log_probs)),
    }
    for engine in engines:
        ray.kill(engine)
    ray.shutdown()
    return found
