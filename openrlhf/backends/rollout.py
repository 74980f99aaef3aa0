"""Interface of rollout engines: `RolloutEngine`, its options, and the list of its classes.

Each engine runs in its own process and receives weights in buckets from the trainer; see
backends/weight_sync/sender.py.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

from openrlhf.backends.peak_memory import Peaks
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, WeightFingerprint
from openrlhf.completions import Completions, SamplingParams
from openrlhf.config.ppo import ACTOR_FLAG
from openrlhf.config.sections import LoraConfig
from openrlhf.errors import RunError
from openrlhf.types import LIKELY, Nuclei

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ENGINES = {
    "vllm": "openrlhf.backends.vllm.engine:VLLMEngine",
    "transformers": "openrlhf.backends.transformers.engine:TransformersEngine",
}
"""Maps the name of an engine to its class (module:name), which is imported on demand."""

MAX_LOGPROBS = 20
"""Largest number of top log-probs that an OpenAI client may request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options of a rollout engine. An engine raises ValueError for options that it does not support."""

    engine: str = "vllm"
    """Name of the engine, a key of `ENGINES`."""
    model: str
    model_flag: str = ACTOR_FLAG
    """The flag that names the model, for messages."""
    dtype: str
    """Dtype of the weights: bf16, fp16 or fp32."""
    max_len: int
    """Maximum number of tokens of prompt and response together."""
    seed: int
    transfer_backend: str
    """Transport of weight syncs: gloo, ray, nccl or ipc."""
    on_gpu: bool
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    enable_sleep: bool = False
    """Allow `sleep`. Without a GPU a sleeping engine keeps its memory, but rejects the same calls."""
    gpu_memory_utilization: float = 0.95
    kv_cache_gb: float | None = None
    load_weights: bool = True
    """Load the weights from the model's files. False: weights are random until the first weight sync."""
    float32_head: bool = False
    """Compute logits in float32 whatever the dtype, as the trainer does."""
    max_images: int = 0
    """Largest number of images in one prompt. 0: text only."""
    max_logprobs: int = MAX_LOGPROBS
    """Maximum number of top log-probs per position, besides that of the sampled token."""
    max_num_seqs: int | None = None
    """Maximum number of sequences in one step of the engine. None: vLLM's default for offline batches, at
    least 256."""
    lora: LoraConfig | None = None
    """Configuration of the adapter that weight syncs send separately from the weights; `target_modules` has
    the last parts of the layers' names. None: weight syncs send merged weights."""
    returns_routing: bool = False
    """Return the routing, the experts that each token was routed to. Needs `enable_prefix_caching`."""
    timeout: float = 300.0
    """Maximum time, seconds, of a control-plane call: pause, update, resume."""
    keep_cache: bool = False
    """Requests that are in flight during a weight sync keep their KV cache, which the old weights
    computed."""
    speculation: Mapping[str, Any] | None = None
    """vLLM's configuration of speculative decoding. None: off."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs."""

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        model: str,
        max_len: int,
        on_gpu: bool,
        transfer_backend: str | None = None,
        **own: Any,
    ) -> Self:
        """Builds the options from the flags that all commands with an engine share: `config.vllm`, `ds` and
        `train`. `own`: further fields, which depend on the command."""
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
            engine_args=vllm.engine_args,
            **own,
        )


class EngineDied(RunError):
    """Raised if an engine's process has ended, so that it cannot answer requests."""


class RolloutEngine(Protocol):
    """One rollout engine. Requests run concurrently; control-plane calls are made one at a time."""

    def __init__(self, options: EngineOptions) -> None: ...

    @staticmethod
    def environment(options: EngineOptions) -> dict[str, str]:
        """Returns environment variables that must be set before the engine's process imports its
        libraries."""
        ...

    async def start(self, free_fraction: float | None = None) -> None:
        """Loads the model. `free_fraction`: fraction of the GPUs' memory that other models on the same GPUs
        leave free; None: there are no other models."""
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
        """Answers one request. Equal seeds give equal answers. Cancelling the call aborts the request.
        `multi_modal_data`: {"image": a list with one picture for each placeholder token}.

        Raises ValueError if the engine does not support the request, and EngineDied if the engine has
        died."""
        ...

    async def probe(self, token_ids: list[int], pictures: "Sequence[Picture]" = ()) -> EngineProbe:
        """Computes the log-probs of every token except the first, at temperature 1. `token_ids` has one
        placeholder for each picture; the result has log-probs of all tokens to which the engine expands
        it."""
        ...

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Connects the engine to the trainer. `init_info`: arguments from the trainer's transport."""
        ...

    async def start_weight_update(self) -> None:
        """Begins a weight update. Requests in flight either finish first, or are paused and continue with the
        new weights after `finish_weight_update`."""
        ...

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        """Receives all weights, or one bucket of them."""
        ...

    async def finish_weight_update(self, weight_version: str) -> None:
        """Ends a weight update. Tokens sampled from here on have this weight version."""
        ...

    async def loaded_checksums(self) -> list[int]:
        """Returns, for each worker, the checksum of the weights that it loaded since `start_weight_update`;
        see `Checksum`."""
        ...

    async def unwritten_parameters(self) -> list[str]:
        """Returns the names of parameters that no weight sync has written in at least one worker."""
        ...

    async def layer_fingerprints(self, lengths: dict[str, int]) -> dict[str, WeightFingerprint]:
        """Returns fingerprints of weights as the engine's layers store them. `lengths`: checkpoint name ->
        length of the fingerprint. Weights that cannot be read back are omitted."""
        ...

    def progress(self) -> tuple[int, bool]:
        """Returns the number of tokens so far, or of another sign of progress that comes at least every few
        seconds, and whether requests are under way that may progress. Called in another thread."""
        ...

    def queue(self) -> tuple[int, int]:
        """Returns the number of requests that are answered, and of those that wait. Called in another
        thread."""
        ...

    async def peak_memory(self) -> Peaks:
        """Returns the peak memory of generation since the last call in bytes, the maximum over workers."""
        ...

    async def sleep(self) -> None:
        """Frees the GPU memory. No request may be in flight."""
        ...

    async def wake(self, tags: list[str]) -> None:
        """Allocates GPU memory for `tags`: weights, kv_cache or both. The engine resumes when both are
        awake."""
        ...


def engine_class(options: EngineOptions) -> type[RolloutEngine]:
    module, _, name = ENGINES[options.engine].partition(":")
    return getattr(importlib.import_module(module), name)


def find_nuclei(ids: np.ndarray, log_probs: np.ndarray) -> Nuclei:
    """Returns the top-p/top-k nucleus of each action: the tokens with a non-zero probability.

    `ids` and `log_probs`, (A, 1 + K): the sampled token of each action, then the K most likely tokens, which
    may include it. Tokens outside the nucleus have the log-prob -inf. If one of the K tokens is outside, the
    returned nucleus is complete, and its entry of `log_masses` is 0. Otherwise the nucleus may have further
    tokens, and the entry is the log of the total probability of the returned tokens.
    """
    values = np.asarray(log_probs, np.float64)
    possible = np.isfinite(values)
    is_whole = ~possible.all(axis=1)
    possible[:, 1:] &= ids[:, 1:] != ids[:, :1]
    shares = np.exp(values, out=np.zeros_like(values), where=possible).sum(axis=1)
    return Nuclei(
        ids=ids[possible],
        counts=possible.sum(axis=1, dtype=np.int32),
        log_masses=np.where(is_whole, 0, np.log(shares.clip(max=1))).astype(np.float32),
    )


def likely_tokens(ids: np.ndarray, log_probs: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` most likely tokens of each action, (A, count) `LIKELY`. `ids` and `log_probs`: as
    those of `find_nuclei`. Whether the sampled token is among the most likely ones does not change them."""
    tokens = np.empty((len(ids), count), LIKELY)
    if len(ids):  # an answer without tokens has no columns
        tokens["id"], tokens["log_prob"] = ids[:, 1 : 1 + count], log_probs[:, 1 : 1 + count]
    return tokens
