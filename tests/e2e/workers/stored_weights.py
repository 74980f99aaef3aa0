"""Weights from a transformers model to a vLLM model by our protocol, with faults put in one after the other:
what the check of what was stored says of each. For faults vLLM must be in this process."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from openrlhf.engine.distributed import free_port
from openrlhf.engine.stored_weights import EngineProbe, check_stored, probe_of
from openrlhf.engine.vllm_transfer import GlooReceiver
from openrlhf.engine.weight_sync import WeightSender
from openrlhf.models.checkpoint_layout import CheckpointLayout, checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.types import PackedRow, Sample

FIRST_SETUP = UnquantizedFusedMoEMethod._setup_kernel.__closure__[0].cell_contents
"""vLLM's own, which engine/vllm_transfer.py wraps."""


class Trainer:
    """What a sender asks of an engine in training."""

    def __init__(self, path: str, dtype: str) -> None:
        self.policy = PolicyModel(load_causal_lm(path, flag="--model", dtype=dtype, attention="eager")).eval()
        shapes = {name: tuple(t.shape) for name, t in checkpoint_tensors(self.policy.model).items()}
        self.layout = CheckpointLayout(self.policy.model, shapes)

    def weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        tensors = {name: t.detach() for name, t in checkpoint_tensors(self.policy.model).items()}
        for conversion in self.layout.conversions:
            yield from self.layout.convert(conversion, tensors).items()

    def weight_metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.weights(0)]

    @torch.no_grad()
    def learn(self) -> None:
        """Weights that are nothing like the last ones."""
        for name, param in self.policy.model.named_parameters():
            if param.dim() > 1:
                param.copy_(param.flatten()[torch.randperm(param.numel())].view_as(param))
            elif "norm" in name:
                param.add_(0.1 * torch.randn_like(param))


class InProcess:
    """The control plane of engines, over a vLLM model in this process."""

    version = 0

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_weight_update(self) -> None:
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.llm.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.collective_rpc("finish_weight_update")

    def checksums(self) -> list[int]:
        return self.llm.collective_rpc("loaded_checksum")

    def probe(self, token_ids: list[int]) -> EngineProbe:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        log_probs = [p[t].logprob for t, p in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)]
        (unwritten,) = self.llm.collective_rpc("unwritten_parameters")
        return EngineProbe(log_probs=log_probs, unwritten=unwritten)


def fault(name: str, model_class: type | None):
    """Something that goes wrong in an engine: the head or the experts are not packed again; or what has
    `name` in its name is passed over, after the checksum has counted it. Empty: nothing."""
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
    """Empty, or why the engine is not taken."""
    probe = probe_of(AutoTokenizer.from_pretrained(trainer.policy.model.name_or_path), 128)
    ids = torch.tensor(probe)
    row = PackedRow.of([Sample(token_ids=ids, action_mask=torch.arange(len(ids)) > 0)])
    with torch.no_grad():
        ours = trainer.policy(row).log_probs
    try:
        check_stored(ours, [client.probe(probe)], dtype)
    except RuntimeError as error:
        return str(error)
    return ""


def main(spec: dict) -> None:
    torch.manual_seed(0)
    trainer = Trainer(spec["model"], spec["dtype"])  # first: vLLM may change transformers' classes
    names = {"fp32": "float32", "bf16": "bfloat16"}
    llm = LLM(
        spec["model"],
        load_format="dummy",
        dtype=names[spec["dtype"]],
        max_model_len=256,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=2**26,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="openrlhf.engine.vllm_transfer.WorkerExtension",
        weight_transfer_config={"backend": "openrlhf_gloo"},
    )
    (model_class,) = llm.apply_model(type) if any(spec["faults"]) else (None,)
    client = InProcess(llm)
    where = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "num_workers": 1, "rank": 0}
    sender = WeightSender(trainer, client, **where)
    verdicts = {}
    for version, name in enumerate(spec["faults"]):
        with fault(name, model_class):
            sender.send(version)
        verdicts[name] = verdict(trainer, client, spec["dtype"])
        trainer.learn()
    sender.send(len(verdicts))
    verdicts["after"] = verdict(trainer, client, spec["dtype"])
    (Path(spec["out"]) / "rank0.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
