"""Every weight in full from ranks that share them, compared with what was announced and what is exported."""

import gc
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.config.choices import BackendName
from openrlhf.config.sections import DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel


def engine_of(path: str, backend: BackendName, rank: int = 0) -> TrainedRank:
    """Builds an engine with adapters of that rank."""
    gc.collect()  # an engine at stage 3 would shard every later model
    ds = DeepSpeedConfig(zero_stage=3, param_dtype="fp32", lora=LoraConfig(rank=rank))
    load = lambda: load_causal_lm(path, flag="--model", dtype="fp32", attention="eager")
    return build_engine(
        lambda: PolicyModel(prepare_for_training(load(), ds)),
        backend=backend,
        optim=OptimConfig(),
        ds=ds,
        total_steps=1,
        mesh=ProcessMesh.joined(),
    )


def examine(path: str, backend: BackendName, bucket_bytes: int, folder: str) -> dict:
    engine = engine_of(path, backend)
    disk = load_file(f"{path}/model.safetensors")
    wrong, sent = set(), []
    # vLLM's NCCL sender keeps the tensors of a bucket before it copies them.
    for name, tensor in list(engine.weights(bucket_bytes)):
        sent.append((name, tensor.dtype, tuple(tensor.shape)))
        if name not in disk or not disk[name].equal(tensor):
            wrong.add(name)
    wrong |= disk.keys() ^ {name for name, *_ in sent}
    engine.export(folder)
    exported = load_file(f"{folder}/model.safetensors")
    wrong |= {name for name in disk if name not in exported or not disk[name].equal(exported[name])}
    dist.barrier()
    return {"count": len(sent), "wrong": sorted(wrong), "as announced": sent == engine.weight_metadata()}


def examine_apart(path: str, backend: BackendName, bucket_bytes: int, folder: str) -> dict:
    """Examines adapters and the weights below them, also after these had other values for a while."""
    engine = engine_of(path, backend, rank=4)
    with engine.random_adapter(seed=1):
        random = dict(engine.weights(bucket_bytes, "adapter"))
    engine.export(folder)
    expected = {
        "base": load_file(f"{path}/model.safetensors"),
        "adapter": load_file(f"{folder}/adapter_model.safetensors"),
    }
    wrong, announced, count = set(), True, 0
    for part, tensors in expected.items():
        found = dict(engine.weights(bucket_bytes, part))
        wrong |= {n for n in tensors.keys() | found.keys() if n not in tensors or n not in found}
        wrong |= {n for n in tensors.keys() & found.keys() if not tensors[n].equal(found[n])}
        if part == "adapter":
            wrong |= {n for n, tensor in found.items() if tensor.equal(random[n])}
        metadata = [(n, t.dtype, tuple(t.shape)) for n, t in found.items()]
        announced, count = announced and metadata == engine.weight_metadata(part), count + len(found)
    dist.barrier()
    return {"count": count, "wrong": sorted(wrong), "as announced": announced}


def on_rank(spec: dict) -> dict:
    """Reports for each model the number of tensors and the names of wrong ones; for the first model also with
    adapters."""
    exported = f"{spec['out']}/exported"
    how = spec["backend"], spec["bucket_bytes"]
    results = {Path(path).name: examine(path, *how, exported) for path in spec["models"]}
    results["adapters"] = examine_apart(spec["models"][0], *how, f"{spec['out']}/adapter")
    return results
