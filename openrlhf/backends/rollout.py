"""Interface of rollout engines: `RolloutEngine`, its options, and the choice of its class.

An engine runs in a process of its own. The trainer sends it weights in buckets, see
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
from openrlhf.errors import RunError
from openrlhf.types import KeptSets

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ENGINES = {
    "vllm": "openrlhf.backends.vllm.engine:VLLMEngine",
    "transformers": "openrlhf.backends.transformers.engine:TransformersEngine",
}
"""Maps an engine's name to its class (module:name), which is imported on demand."""

MAX_LOGPROBS = 20
"""Largest number of top log-probs that an OpenAI client may request."""

USABLE_FRACTION = 0.95
"""Fraction of the memory left by models on its GPUs that an engine may take. The rest is for weight syncs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options of a rollout engine. An engine raises ValueError for options that it does not support."""

    engine: str = "vllm"
    """Name of the engine, a key of `ENGINES`."""
    model: str
    dtype: str
    """Dtype of the weights: bf16, fp16 or fp32."""
    max_len: int
    """Largest number of tokens in prompt and response together."""
    seed: int
    transfer_backend: str
    """Backend of weight transfers: gloo, ray, nccl or ipc."""
    on_gpu: bool
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    enable_sleep: bool = False
    """The engine can sleep. Without a GPU a sleeping engine keeps its memory, but refuses the same calls."""
    gpu_memory_utilization: float = 0.95
    kv_cache_gb: float | None = None
    load_weights: bool = True
    """Load the weights from the model's files. Off: they are random until the first weight sync."""
    float32_head: bool = False
    """Compute logits in float32 whatever the dtype, as the trainer does."""
    max_images: int = 0
    """Largest number of images in one prompt. 0: text only."""
    max_logprobs: int = MAX_LOGPROBS
    """Largest number of top log-probs for each position, beside the sampled token's."""
    max_num_seqs: int | None = None
    """Largest number of sequences in one step of the engine. None: vLLM's choice for offline batches, at
    least 256."""
    lora: LoraConfig | None = None
    """Configuration of adapters that weight syncs send beside the weights, on layers whose last names are its
    `target_modules`. None: weight syncs send weights alone."""
    returns_routing: bool = False
    """Return the routing: which experts read each token. Needs `enable_prefix_caching`."""
    keep_cache: bool = False
    """Requests that a weight sync pauses keep the KV cache that the old weights computed."""

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
        """Builds options from the flags that all commands with an engine have. `own`: fields that one command
        decides."""
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


class EngineDied(RunError):
    """Raised when an engine's process has ended, so that it answers no further request."""


class RolloutEngine(Protocol):
    """One rollout engine. Requests run concurrently; control-plane calls come one at a time."""

    def __init__(self, options: EngineOptions) -> None: ...

    @staticmethod
    def environment(options: EngineOptions) -> dict[str, str]:
        """Returns environment variables that must be set before the engine's process imports its
        libraries."""
        ...

    async def start(self, free_fraction: float | None = None) -> None:
        """Loads the model. `free_fraction`: the fraction of its GPUs' memory that other models on them leave
        free; None where there are no other models."""
        ...

    def shutdown(self) -> None: ...

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a log-prob."""
        ...

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        """Answers one request. Equal seeds give equal answers; cancelling the call aborts the request.
        `multi_modal_data`: `image`, a list with one picture for each placeholder among the tokens.

        Raises ValueError where the engine does not support the request, and EngineDied."""
        ...

    async def probe(self, token_ids: list[int], pictures: "Sequence[Picture]" = ()) -> EngineProbe:
        """Computes the log-probs of every token but the first, at temperature 1. `token_ids` have one
        placeholder for each picture; the result has log-probs for all of the picture's tokens."""
        ...

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Connects the engine for weight transfers. `init_info` comes from the trainer's transfer backend."""
        ...

    async def start_weight_update(self) -> None:
        """Begins a weight update. Requests in flight either end first, or wait and go on with the new weights
        after `finish_weight_update`."""
        ...

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        """Receives weights: all, or a bucket of them."""
        ...

    async def finish_weight_update(self, weight_version: str) -> None:
        """Ends a weight update. From here on answers carry this version."""
        ...

    async def loaded_checksums(self) -> list[int]:
        """Returns each worker's checksum of what it loaded since `start_weight_update`, see `Checksum`."""
        ...

    async def unwritten_parameters(self) -> list[str]:
        """Returns the names of parameters that some worker has never had changed by a weight sync."""
        ...

    async def layer_sketches(self, lengths: dict[str, int]) -> dict[str, Sketch]:
        """Returns sketches of those weights with these names and lengths that can be read back from the
        engine's layers."""
        ...

    async def peak_memory(self) -> Peaks:
        """Returns the peak bytes of generation since the last call, in the worker that needs most."""
        ...

    async def sleep(self) -> None:
        """Frees the GPU's memory. No request may be in flight."""
        ...

    async def wake(self, tags: list[str]) -> None:
        """Takes memory for `tags`: weights, kv_cache or both. The engine resumes once both are awake."""
        ...


def engine_class(options: EngineOptions) -> type[RolloutEngine]:
    module, _, name = ENGINES[options.engine].partition(":")
    return getattr(importlib.import_module(module), name)


def kept_sets(ids: np.ndarray, log_probs: np.ndarray) -> KeptSets:
    """Returns the top-p/top-k support: the tokens with a non-zero probability at each position.

    `ids` and `log_probs`, (A, 1 + K): the sampled token of each position, then the K most likely tokens,
    which may repeat it. A log-prob of -inf marks a token outside the support. A set is complete where one of
    the K tokens is outside; else the support may have further tokens, and `log_masses` holds the log of the
    probability of the returned ones together (0 for a complete set).
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
    """A stream that generates one answer at a time, token by token."""

    def stream(self, prompt: list[int], seed: int, decoding: Any) -> Any:
        """Yields the tokens of the answer. Closing the generator stops it."""
        ...

    def close(self) -> None: ...
