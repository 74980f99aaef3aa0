"""Weights from a transformers model to a vLLM model by the package's own protocol, with one fault after the
other; reports the verdict of the check of stored weights on each. vLLM must be in this process, because
faults are patched into it."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from sending import Trainer
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.weight_receiver import GlooReceiver
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.backends.weight_sync.stored_weights import (
    DifferentWeightsError,
    EngineProbe,
    Limit,
    WeightFingerprint,
    build_probe,
    check_stored,
    differing_weights,
    explain_difference,
    fingerprints,
)
from openrlhf.rows import PackedRow, Sample

FIRST_SETUP = UnquantizedFusedMoEMethod._setup_kernel.__closure__[0].cell_contents
"""vLLM's own function, which backends/vllm/weight_receiver.py wraps."""


class InProcess:
    """Control plane of engines, over a vLLM model in this process."""

    version = 0
    num_engines = workers_per_engine = 1
    ends_with_first = False

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.failures: dict[int, str] = {}

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_weight_update(self) -> None:
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.llm.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.collective_rpc("finish_weight_update")

    def checksums(self) -> dict[int, list[int]]:
        return {0: self.llm.collective_rpc("loaded_checksum")}

    def probe(self, token_ids: list[int]) -> EngineProbe:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        log_probs = [p[t].logprob for t, p in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)]
        return EngineProbe(log_probs=log_probs, version=self.version)

    def reason(self, trainer: Trainer, limit: Limit) -> str:
        sent = fingerprints(trainer.weights(0))
        lengths = {name: fingerprint.length for name, fingerprint in sent.items()}
        (stored,) = self.llm.collective_rpc("layer_fingerprints", args=(lengths,))
        found = {name: WeightFingerprint(*numbers) for name, numbers in stored.items()}
        (unwritten,) = self.llm.collective_rpc("unwritten_parameters")
        return explain_difference(unwritten, differing_weights(sent, found, limit.relative), len(found))


def fault(name: str, model_class: type | None):
    """Returns a context with a fault of an engine: "head" or "experts" are not packed again; another `name`
    skips tensors with it in their names, after the checksum has counted them. Empty: no fault."""
    if name == "head":
        finish = lambda self: finalize_layerwise_reload(self.model, self.model_config)
        return patch.object(GlooReceiver, "finish_weight_update", finish)
    if name == "experts":
        return patch.object(UnquantizedFusedMoEMethod, "_setup_kernel", FIRST_SETUP)
    if model_class is None:
        return nullcontext()
    load = model_class.load_weights
    most = lambda model, weights: load(model, ((n, t) for n, t in weights if not name or name not in n))
    return patch.object(model_class, "load_weights", most)


def verdict(trainer: Trainer, client: InProcess, dtype: str) -> str:
    """Returns why the check refuses the engine, or "" where it does not."""
    probe = build_probe(AutoTokenizer.from_pretrained(trainer.policy.model.name_or_path), 128)
    ids = torch.tensor(probe)
    row = PackedRow.of([Sample(token_ids=ids, action_mask=torch.arange(len(ids)) > 0)])
    with torch.no_grad():
        ours = trainer.policy(row).log_probs
    limit = Limit(dtype=dtype, on_gpu=False)
    try:
        check_stored(ours, 0, client.probe(probe), limit)
    except DifferentWeightsError as error:
        return f"{error} {client.reason(trainer, limit)}"
    return ""


def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Trainer(spec["model"], spec["dtype"])  # first, because vLLM may change transformers' classes
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    sampled = spec.get("engine_dtype", spec["dtype"])
    coarsest = max(spec["dtype"], sampled, key=lambda dtype: Limit(dtype=dtype, on_gpu=False).relative)
    llm = LLM(
        spec["model"],
        load_format="dummy",
        dtype=names[sampled],
        max_model_len=256,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=2**26,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="openrlhf.backends.vllm.weight_receiver.WorkerExtension",
        weight_transfer_config={"backend": "openrlhf_gloo"},
    )
    (model_class,) = llm.apply_model(type) if any(spec["faults"]) else (None,)
    client = InProcess(llm)
    where = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "rank": 0}
    sender = WeightSender(trainer, client, **where)
    verdicts = {}
    for version, name in enumerate(spec["faults"]):
        with fault(name, model_class):
            sender.send(version)
        verdicts[name] = verdict(trainer, client, coarsest)
        trainer.learn()
    sender.send(len(verdicts))
    verdicts["after"] = verdict(trainer, client, coarsest)
    return verdicts
