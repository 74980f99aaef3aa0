"""Weights from a transformers model in this process to a vLLM engine of several workers; reports what each of
them loaded, and whether they compute with it together."""

import asyncio

import torch
from sending import Client, Trainer, differences, options_of
from transformers import AutoTokenizer

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.stored_weights import build_probe


async def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Trainer(spec["model"], "fp32")
    options = options_of(
        spec["model"], tensor_parallel_size=spec["shards"], pipeline_parallel_size=spec["stages"]
    )
    engine = VLLMEngine(options)
    await engine.start()
    client = Client(engine)
    meeting = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "rank": 0}
    sender = await asyncio.to_thread(WeightSender, trainer, client, bucket_bytes=1 << 14, **meeting)
    probe = build_probe(AutoTokenizer.from_pretrained(spec["model"]), 128)
    found: dict = {"differences": [], "workers": len(await engine.loaded_checksums())}
    for version in (1, 2):
        await asyncio.to_thread(sender.send, version)  # compares the checksum of every worker
        answer = await engine.probe(probe)
        found["differences"].append(max(differences(trainer.policy, probe, answer.log_probs)))
        trainer.learn()
    found["unwritten"] = await engine.unwritten_parameters()
    engine.shutdown()
    return found
