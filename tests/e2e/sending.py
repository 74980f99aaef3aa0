"""Stand-ins for a training engine that sends weights to engines, and for the control plane of such an
engine."""

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.completions import SamplingParams
from openrlhf.models.checkpoint_layout import CheckpointLayout, checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample


def options_of(model: str, **more: Any) -> EngineOptions:
    """Returns the options of an engine without weights, which waits for them."""
    own = {"max_len": 256, "seed": 0, "transfer_backend": "gloo", "on_gpu": False, "load_weights": False}
    return EngineOptions(model=model, dtype="fp32", **own, **more)


async def sync_under_way(
    engine: VLLMEngine, prompt: list[int], trainer: "Trainer", sender: WeightSender
) -> None:
    """Streams an answer of 40 tokens, and after 10 of them sends the next weights, as version 2."""
    params, seen = SamplingParams(max_tokens=40, seed=3, detokenize=False), 0
    params.ignore_eos = True
    async for tokens in engine.stream(prompt, params):
        seen += len(tokens)
        if seen == 10:
            trainer.learn()
            await asyncio.to_thread(sender.send, 2)


class Trainer:
    """Training engine as a weight sender sees it."""

    def __init__(self, path: str, dtype: str) -> None:
        self.policy = PolicyModel(load_causal_lm(path, flag="--model", dtype=dtype, attention="eager")).eval()
        shapes = {name: tuple(t.shape) for name, t in checkpoint_tensors(self.policy.model).items()}
        self.layout = CheckpointLayout(self.policy.model, shapes)

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        tensors = {name: t.detach() for name, t in checkpoint_tensors(self.policy.model).items()}
        for conversion in self.layout.conversions:
            yield from self.layout.convert(conversion, tensors).items()

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.weights(0)]

    @torch.no_grad()
    def learn(self) -> None:
        """Replaces the weights by unrelated ones."""
        for name, param in self.policy.model.named_parameters():
            if param.dim() > 1:
                param.copy_(param.flatten()[torch.randperm(param.numel())].view_as(param))
            elif "norm" in name:
                param.add_(0.1 * torch.randn_like(param))


class Client:
    """Control plane of one engine, called from a thread beside the engine's event loop."""

    version = 0
    num_engines = 1
    ends_with_first = False

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine, self.loop = engine, asyncio.get_running_loop()
        self.workers_per_engine = engine.options.num_workers
        self.failures: dict[int, str] = {}

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._wait(self.engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._wait(self.engine.start_weight_update())

    def update_weights(self, update_info: dict) -> None:
        self._wait(self.engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self.engine.finish_weight_update(str(self.version)))

    def checksums(self) -> dict[int, list[int]]:
        return {0: self._wait(self.engine.loaded_checksums())}

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(100)


def differences(policy: PolicyModel, token_ids: list[int], log_probs: list[float]) -> list[float]:
    """Returns the absolute differences between `log_probs` and `policy`'s log-probs of the last tokens."""
    ids = torch.tensor(token_ids)
    is_action = torch.arange(len(ids)) >= len(ids) - len(log_probs)
    with torch.no_grad():
        expected = policy(PackedRow.of([Sample(token_ids=ids, action_mask=is_action)])).log_probs
    return (expected - torch.tensor(log_probs)).abs().tolist()
