"""What a rollout may ask of an engine that samples: `RolloutEngine`, and how one is chosen and made.

An engine lives in a process of its own. Weights reach it in buckets from the trainer, see
backends/weight_sync/sender.py.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

from openrlhf.backends.peak_memory import Peaks
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, Sketch
from openrlhf.completions import Completions, SamplingParams
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import LoraConfig
from openrlhf.types import KeptSets

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ENGINES = {
    "vllm": "openrlhf.backends.vllm.engine:VLLMEngine",
    "transformers": "openrlhf.backends.transformers.engine:TransformersEngine",
}
"""Maps names of engines to their classes, which are imported where they are needed."""

MAX_LOGPROBS = 20
"""Likely tokens that OpenAI's clients may ask for."""

USABLE_FRACTION = 0.95
"""The part of the memory left by models on its GPUs that an engine may take. The rest is for a weight
sync."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How to build an engine. An engine refuses what it cannot do."""

    engine: str = "vllm"
    """A name of `ENGINES`."""
    model: str
    dtype: str
    """bf16, fp16 or fp32."""
    max_len: int
    """Prompt and response together."""
    seed: int
    transfer_backend: str
    """gloo, nccl or ipc."""
    on_gpu: bool
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    enable_sleep: bool = False
    """Without a GPU a sleeping engine keeps its memory, and refuses the same calls."""
    gpu_memory_utilization: float = 0.95
    kv_cache_gb: float | None = None
    load_weights: bool = True
    """Off: the weights are random until a weight sync."""
    float32_head: bool = False
    """Logits in float32 whatever the dtype, as a trainer has them."""
    max_images: int = 0
    """In one prompt. 0: text only."""
    max_logprobs: int = MAX_LOGPROBS
    """Likely tokens of each position that a request may ask for, beside the sampled one."""
    max_num_seqs: int | None = None
    """Sequences in one step of the engine. None: as vLLM chooses for offline batches, at least 256."""
    lora: LoraConfig | None = None
    """Adapters that weight syncs bring beside the weights, on layers whose last names are its
    `target_modules`. None: weights are all that comes."""
    returns_routing: bool = False
    """Answers say which experts read each token. Needs `enable_prefix_caching`."""
    keep_cache: bool = False
    """Requests that a weight sync pauses go on with what their tokens were to the old weights."""

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def of(
        cls,
        config: PPOConfig | BatchInferenceConfig | ChatConfig,
        *,
        model: str,
        max_len: int,
        on_gpu: bool,
        transfer_backend: str | None = None,
        **own: Any,
    ) -> Self:
        """From the flags that all commands with an engine have. `own`: fields that one command decides."""
        vllm = config.vllm
        return cls(
            model=model,
            dtype=config.ds.param_dtype,
            max_len=max_len,
            seed=config.train.seed,
            transfer_backend=transfer_backend or ("nccl" if on_gpu else "gloo"),
            on_gpu=on_gpu,
            tensor_parallel_size=vllm.tensor_parallel_size or (torch.cuda.device_count() if on_gpu else 1),
            enforce_eager=vllm.enforce_eager,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_gb=vllm.kv_cache_gb,
            **own,
        )


class EngineDied(RuntimeError):
    """An engine's process has ended, and no request will be answered any more."""


class RolloutEngine(Protocol):
    """One engine. Requests run side by side; the control plane's calls come one at a time."""

    def __init__(self, options: EngineOptions) -> None: ...

    @staticmethod
    def environment(options: EngineOptions) -> dict[str, str]:
        """Returns variables that must be set before the engine's process imports its libraries."""
        ...

    async def start(self, free_fraction: float | None = None) -> None:
        """Loads the model. `free_fraction`: the part of its GPUs' memory that models on them leave; None
        where there are none."""
        ...

    def shutdown(self) -> None: ...

    @property
    def vocabulary(self) -> int:
        """Tokens that have a log-prob."""
        ...

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """One request. Equal seeds give equal answers; cancelling the call gives the request up.
        `multi_modal_data`: `image`, a list with one picture for each placeholder among the tokens.

        ValueError where the engine cannot do what is asked; EngineDied."""
        ...

    async def probe(self, token_ids: list[int], pictures: "Sequence[Picture]" = ()) -> EngineProbe:
        """Computes the log-probs of every token but the first, at temperature 1. `token_ids`: with one
        placeholder for each of the pictures, which is answered as all of its tokens."""
        ...

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Opens the way for weights. `init_info`: what the trainer's transfer backend says."""
        ...

    async def start_weight_update(self) -> None:
        """Requests in flight either end first, or wait and go on with the new weights after
        `finish_weight_update`."""
        ...

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        """Takes weights: all, or a bucket of them."""
        ...

    async def finish_weight_update(self, weight_version: str) -> None:
        """From here on answers name this version."""
        ...

    async def loaded_checksums(self) -> list[int]:
        """Returns each worker's checksum of what it loaded since `start_weight_update`, see
        Checksum."""
        ...

    async def unwritten_parameters(self) -> list[str]:
        """Returns the parameters that no weight sync has changed, on any worker."""
        ...

    async def layer_sketches(self, lengths: dict[str, int]) -> dict[str, Sketch]:
        """Returns sketches of the layers' weights with these names and lengths, as far as they can be read
        back."""
        ...

    async def peak_memory(self) -> Peaks:
        """Returns the most bytes that generation needed since the last call, in the worker that needs
        most."""
        ...

    async def sleep(self) -> None:
        """Gives the GPU's memory back. Nothing may be in flight."""
        ...

    async def wake(self, tags: list[str]) -> None:
        """Takes memory for `tags`, weights or kv_cache. With the last of them the engine goes on."""
        ...


def engine_class(options: EngineOptions) -> type[RolloutEngine]:
    module, _, name = ENGINES[options.engine].partition(":")
    return getattr(importlib.import_module(module), name)


def kept_sets(ids: np.ndarray, log_probs: np.ndarray) -> KeptSets:
    """The tokens with a probability at each position.

    `ids` and `log_probs`, (A, 1 + K): the sampled token of each position stands first, and once more where it
    is among the K most likely ones, which follow it. -inf: sampling did not keep the token. A set is whole
    where one of the likely tokens was not kept; else it may have more tokens, and `log_masses` says how
    probable these are together.
    """
    values = np.asarray(log_probs, np.float64)
    possible = np.isfinite(values)
    is_whole = ~possible.all(axis=1)
    possible[:, 1:] &= ids[:, 1:] != ids[:, :1]
    shares = np.exp(values, out=np.zeros_like(values), where=possible).sum(axis=1)
    return KeptSets(
        ids=ids[possible],
        counts=possible.sum(axis=1, dtype=np.int32),
        log_masses=np.where(is_whole, 0, np.log(shares.clip(max=1))).astype(np.float32),
    )


class AnswerStream(Protocol):
    """One answer at a time, token by token."""

    def stream(self, prompt: list[int], seed: int, decoding: Any) -> Any:
        """Yields the tokens of the answer. Closing the generator stops it."""
        ...

    def close(self) -> None: ...
