"""The vLLM rollout engine: token ids in, token ids out.

`VLLMEngine` runs in its own process (a Ray actor) with the environment variables `engine_environment`.
"""

import asyncio
import gc
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf import heap
from openrlhf.backends.peak_memory import Peaks
from openrlhf.backends.rollout import EngineDied, EngineOptions
from openrlhf.backends.vllm import parent_death_guard
from openrlhf.backends.vllm.requests import completions, library, vllm_params
from openrlhf.backends.vllm.support import engine_arguments
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, WeightFingerprint
from openrlhf.completions import Completions, SamplingParams
from openrlhf.config.choices import VLLM_LORA_RANKS
from openrlhf.config.sections import LoraConfig
from openrlhf.errors import ErrorCode, RunError, UsageError, first_line
from openrlhf.files import socket_folder
from openrlhf.hub import model_folder
from openrlhf.memory.engines import CPU_KV_CACHE_GB, memory_fraction
from openrlhf.text import image_data
from openrlhf.types import not_none

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from vllm.config.model import ModelDType
    from vllm.inputs import TokensInput, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


CPU_BATCHED_TOKENS = 4096
"""Maximum number of tokens in one step of an engine on a CPU, unless `max_len` is larger."""

TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine that can sleep, by vLLM's names."""

ADAPTER = 1
"""Id of an engine's only adapter in vLLM."""


def engine_environment(options: EngineOptions) -> dict[str, str]:
    """Returns environment variables that must be set before vLLM is imported."""
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    common = {name: os.environ.get(name, value) for name, value in quiet.items()}
    if options.transfer_backend == "ipc":
        # Handles of GPU memory contain classes and dtypes, so vLLM must pickle them between its frontend and
        # its core. The socket is a local file to which no other process writes.
        common["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if options.on_gpu:
        # vLLM forks its workers unless CUDA is initialized. But CUDA fails in a forked process even after a
        # mere query for GPUs, which vLLM does not notice.
        return common | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    cores = os.cpu_count() or 1
    bind = "|".join(str(i % cores) for i in range(options.num_workers))
    return common | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Saves one process per engine. Several workers need separate processes.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.num_workers == 1 else "1",
        # The default pins every engine to the first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if options.num_workers == 1 else bind,
        "TORCH_COMPILE_DISABLE": "1",
        # Pages of 2 MiB cut the time of writing to new memory, of which a weight sync takes much, to a third.
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    }


def has_second_runner() -> bool:
    """Returns True if vLLM uses its second model runner, which needs Triton: on GPUs, and on CPUs with a CPU
    build of Triton."""
    asked = library().envs.VLLM_USE_V2_MODEL_RUNNER
    return library().triton_utils.HAS_TRITON if asked is None else asked


def _lora_arguments(lora: LoraConfig | None) -> dict[str, Any]:
    """Returns vLLM's arguments for adapters. vLLM supports only some LoRA ranks: the next larger one is used,
    and padded with zeros."""
    if lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": min(rank for rank in VLLM_LORA_RANKS if rank >= lora.rank),
        "lora_target_modules": list(lora.target_modules),
    }


def _speculation_options(options: EngineOptions) -> dict[str, Any] | None:
    """Returns vLLM's arguments for speculative decoding. A draft model is loaded from its files even if the
    policy waits for its weights."""
    if options.speculation is None:
        return None
    speculation = dict(options.speculation)
    if not options.load_weights:
        speculation.setdefault("draft_load_config", {"load_format": "auto"})
    return speculation


@contextmanager
def refusals(options: EngineOptions) -> Iterator[None]:
    """Converts the ValueError with which vLLM refuses to start to UsageError: any with speculative
    decoding or options passed through, and otherwise that of its `ModelConfig`, which pydantic checks. Its
    other configurations follow from flags and checks of this package, not from the model."""
    try:
        yield
    except ValueError as error:
        reason, listed = str(error), getattr(error, "errors", None)  # pydantic's
        if listed is not None:
            reason = "; ".join(each["msg"].removeprefix("Value error, ") for each in listed())
        # vLLM lists hundreds of architectures
        reason = first_line(ValueError(reason.partition(" Supported architectures: ")[0]))
        if options.speculation is not None:
            flag, value = "--vllm.speculative", json.dumps(options.speculation)
            text = f"vLLM refuses it: {reason}\nChange it, or remove it."
        elif options.engine_args:
            flag, value = "--vllm.engine_args", json.dumps(options.engine_args)
            text = f"vLLM does not start with it: {reason}\nChange it, or remove it."
        elif listed is not None and getattr(error, "title", "") == "ModelConfig":
            flag, value = options.model_flag, options.model
            text = f"vLLM does not run this model: {reason}"
        else:
            raise
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=value) from error


def _set_routing(output: "RequestOutput", recorded: dict[int, tuple], num_experts: int) -> None:
    """Sets each answer's routing, in a dtype that can represent `types.own_choice` besides all experts.
    `recorded`: answer index -> routing, if vLLM does not return the routing itself."""
    dtype = np.uint8 if num_experts < 256 else np.int16
    for answer in output.outputs:
        if answer.index in recorded:
            data, name, shape = recorded[answer.index]
            answer.routed_experts = np.frombuffer(data, name).reshape(shape)
        if answer.routed_experts is not None:
            answer.routed_experts = answer.routed_experts.astype(dtype, copy=False)


@contextmanager
def _converted_errors() -> Iterator[None]:
    """Converts vLLM's exceptions to EngineDied and UsageError."""
    try:
        yield
    except library().EngineDeadError as error:
        raise EngineDied(ErrorCode.ENGINE_FAILED, str(error)) from error
    except library().VLLMValidationError as error:
        raise UsageError(ErrorCode.INVALID_VALUE, str(error)) from error


class VLLMEngine:
    """A vLLM engine. `RolloutEngine` documents the methods that all engines have."""

    environment = staticmethod(engine_environment)

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.asleep: frozenset[str] = frozenset()
        self.peak = 0
        """Peak memory of generation in bytes, recorded before the engine's last sleep. 0: nothing
        recorded."""
        self.adapter: LoRARequest | None = None
        """Adapter of all requests; None until a weight sync has sent one."""
        self.num_outputs, self.num_running = 0, 0
        """Number of outputs of vLLM's core so far, and of its answers to control calls."""
        self.num_requests, self.num_calls = 0, 0
        """Number of requests under way, and of control calls."""
        self.is_updating = False
        """True while a weight update pauses the requests."""
        self.num_syncs = 0
        """Number of weight syncs so far."""
        self.records_routing = False
        """True if `RoutingRecorder` records the routing, because vLLM does not return it."""

    async def start(self, free_fraction: float | None = None) -> None:
        heap.freeze()
        parent_death_guard.lead()
        os.environ.setdefault("VLLM_RPC_BASE_PATH", socket_folder())
        dtypes: dict[str, ModelDType] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        options, vllm = self.options, library()
        self.records_routing = options.returns_routing and not (options.on_gpu or has_second_runner())
        kv_cache_gb = options.kv_cache_gb
        if kv_cache_gb is None and not options.on_gpu:
            kv_cache_gb = CPU_KV_CACHE_GB
        given = engine_arguments(options.engine_args)
        overrides = {"head_dtype": "float32"} if options.float32_head else {}
        arguments = partial(
            vllm.AsyncEngineArgs,
            model=model_folder(options.model, weights=options.load_weights),
            trust_remote_code=False,
            load_format="auto" if options.load_weights else "dummy",
            dtype=dtypes[options.dtype],
            max_model_len=options.max_len,
            seed=options.seed,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            enable_prefix_caching=options.enable_prefix_caching,
            enable_return_routed_experts=options.returns_routing and not self.records_routing,
            max_num_seqs=options.max_num_seqs,
            limit_mm_per_prompt={"image": options.max_images, "video": 0} if options.max_images else {},
            # Otherwise mean and standard deviation of pixels are buffers of the model. No weight sync
            # sends them, so a model that starts with random weights would keep random values.
            mm_device_do_normalize=False,
            # On a CPU there are no graphs to capture, and compiling takes longer than it saves.
            enforce_eager=options.enforce_eager or not options.on_gpu,
            # Chunked prefill rewinds the random state of a request, which CPU generators do not support.
            enable_chunked_prefill=None if options.on_gpu else False,
            max_num_batched_tokens=None if options.on_gpu else max(options.max_len, CPU_BATCHED_TOKENS),
            enable_sleep_mode=options.enable_sleep and options.on_gpu,
            gpu_memory_utilization=memory_fraction(options.gpu_memory_utilization, free_fraction),
            kv_cache_memory_bytes=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
            disable_log_stats=True,
            use_tqdm_on_load=False,
            generation_config="vllm",
            hf_overrides=overrides | given.pop("hf_overrides", {}),
            # Log-probs of the sampling distribution: after temperature, top-k and top-p.
            logprobs_mode="processed_logprobs",
            max_logprobs=options.max_logprobs,
            worker_extension_cls="openrlhf.backends.vllm.weight_receiver.WorkerExtension",
            weight_transfer_config=vllm.WeightTransferConfig(backend=f"openrlhf_{options.transfer_backend}"),
            speculative_config=_speculation_options(options),
            **_lora_arguments(options.lora),
        )(**given)
        with refusals(options):
            self.llm: AsyncLLM = vllm.AsyncLLM.from_engine_args(
                arguments,
                # Selects vLLM's batch sizes for offline use. For other usages the default is 128 sequences.
                usage_context=vllm.UsageContext.LLM_CLASS,
            )
        self._count_outputs()
        if options.pipeline_parallel_size > 1 and not options.on_gpu:
            await self._bounded(self.llm.collective_rpc("make_stage_buffers"))
        if self.records_routing:
            await self._bounded(self.llm.collective_rpc("record_routing"))
        await self._bounded(self.llm.update_weight_version("0"))  # vLLM's initial version is not a number

    @property
    def vocabulary(self) -> int:
        return self.llm.model_config.get_vocab_size()

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        return completions(
            await self._answer(prompt_token_ids, sampling_params, multi_modal_data), sampling_params
        )

    async def _answer(
        self, prompt_token_ids: list[int], params: SamplingParams, multi_modal_data: dict | None = None
    ) -> "RequestOutput":
        self._require_awake(TAGS)
        prompt = self._prompt(prompt_token_ids, multi_modal_data)
        output, name, routing = None, uuid.uuid4().hex, {}
        self.num_requests += 1
        with _converted_errors():
            try:
                async for latest in self.llm.generate(
                    prompt, vllm_params(params), request_id=name, lora_request=self.adapter
                ):
                    output = latest
            finally:  # also after an error, so that the workers do not keep the record
                self.num_requests -= 1
                if self.records_routing:
                    routing, *_ = await self._bounded(self.llm.collective_rpc("take_routing", args=(name,)))
        assert output is not None  # vLLM answers or raises
        if self.options.returns_routing:
            _set_routing(output, routing, self.llm.model_config.get_num_experts())
        return output

    def progress(self) -> tuple[int, bool]:
        is_sampling = self.num_requests > 0 and not (self.is_updating or self.asleep)
        return self.num_outputs, is_sampling or self.num_calls > 0

    def queue(self) -> tuple[int, int]:
        """Returns the number of requests that the core's last step continued, and of all others."""
        running = min(self.num_requests, self.num_running)
        return running, self.num_requests - running

    def _count_outputs(self) -> None:
        """Counts what vLLM's core returns: a part of an answer for each request in each step of the core."""
        process = self.llm.output_processor.process_outputs

        def counted(outputs: list, *arguments: Any, **named: Any) -> Any:
            self.num_outputs += len(outputs)
            self.num_running = len(outputs)
            return process(outputs, *arguments, **named)

        self.llm.output_processor.process_outputs = counted  # pyrefly: ignore[bad-assignment]

    async def stream(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams
    ) -> AsyncIterator[list[int]]:
        """Yields the token ids of one answer as they are sampled."""
        prompt, params = self._prompt(prompt_token_ids), vllm_params(sampling_params, stream=True)
        async for latest in self.llm.generate(prompt, params, request_id=uuid.uuid4().hex):
            yield list(latest.outputs[0].token_ids)

    def _prompt(
        self, token_ids: list[int], multi_modal_data: dict | None = None
    ) -> "TokensInput | TokensPrompt":
        more: Any = {}
        if self.options.keep_cache:
            # The salt keeps new requests from reusing KV cache blocks that old weights computed.
            more["cache_salt"] = str(self.num_syncs)
        if multi_modal_data is not None:
            more["multi_modal_data"] = multi_modal_data
            return library().TokensPrompt(prompt_token_ids=token_ids, **more)
        # vLLM would process a TokensPrompt in a thread, which takes a third of a request's time.
        return library().TokensInput(type="token", prompt_token_ids=token_ids, **more)

    async def probe(self, token_ids: list[int], pictures: Sequence["Picture"] = ()) -> EngineProbe:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        output = await self._answer(token_ids, params, image_data(pictures))
        read, of_positions = not_none(output.prompt_token_ids), not_none(output.prompt_logprobs)
        log_probs = [
            not_none(of)[token].logprob for token, of in zip(read[1:], of_positions[1:], strict=True)
        ]
        return EngineProbe(
            log_probs=log_probs, version=int(not_none(output.outputs[0].weight_versions)[-1].version)
        )

    async def init_weight_transfer_engine(self, init_info: dict) -> None:
        request = library().WeightTransferInitRequest(init_info=init_info)
        await self._bounded(self.llm.init_weight_transfer_engine(request))

    async def start_weight_update(self) -> None:
        """Pauses the engine and begins a weight update. Until `finish_weight_update` the model has no
        weights, and scheduling a request would crash the engine. Requests in flight are frozen. Afterwards
        their KV cache is recomputed, or with `keep_cache` they continue with the old one."""
        self._require_awake({"weights"})
        self.is_updating = True
        await self._bounded(self.llm.pause_generation(mode="keep", clear_cache=not self.options.keep_cache))
        self.num_syncs += 1  # from here on no request computes with the old weights
        await self._bounded(self.llm.start_weight_update())

    async def update_weights(self, update_info: dict | list[dict]) -> None:
        request = library().WeightTransferUpdateRequest(update_info=update_info)
        await self._bounded(self.llm.update_weights(request))

    async def finish_weight_update(self, weight_version: str) -> None:
        await self._bounded(self.llm.finish_weight_update(weight_version=weight_version))
        if self.options.lora is not None:
            await self._use_adapter(self.options.lora)
        if not self.options.keep_cache and not await self._bounded(
            self.llm.reset_prefix_cache(reset_running_requests=True)
        ):
            text = "vLLM kept the prefix cache of the old weights after a weight sync"
            raise RunError(ErrorCode.ENGINE_FAILED, text)
        self.is_updating = False
        if not self.asleep:  # else it resumes when its KV cache wakes
            await self._bounded(self.llm.resume_generation())

    async def _use_adapter(self, lora: LoraConfig) -> None:
        config = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.target_modules)}
        await self._bounded(self.llm.collective_rpc("use_adapter", args=(ADAPTER, config)))
        # The workers have the adapter already, so the path that a LoRARequest must have is never read.
        self.adapter = library().LoRARequest("policy", ADAPTER, "held by the workers")

    async def loaded_checksums(self) -> list[int]:
        return await self._bounded(self.llm.collective_rpc("loaded_checksum"))

    async def unwritten_parameters(self) -> list[str]:
        workers = await self._bounded(self.llm.collective_rpc("unwritten_parameters"))
        return sorted({name for names in workers for name in names})

    async def layer_fingerprints(self, lengths: dict[str, int]) -> dict[str, WeightFingerprint]:
        """Returns the workers' fingerprints, see `WorkerExtension.layer_fingerprints`. If several workers
        have a fingerprint of the same weight, returns the last one."""
        workers = await self._bounded(self.llm.collective_rpc("layer_fingerprints", args=(lengths,)))
        return {name: WeightFingerprint(*numbers) for found in workers for name, numbers in found.items()}

    async def peak_memory(self) -> Peaks:
        if not self.asleep:
            await self._note_peak()
        taken, self.peak = self.peak, 0
        return {"generate": taken} if taken else {}

    async def _note_peak(self) -> None:
        self.peak = max(self.peak, *await self._bounded(self.llm.collective_rpc("peak_memory")))

    async def sleep(self) -> None:
        """Frees the GPU memory: moves weights to the CPU and drops the KV cache. No request may be in flight,
        because vLLM would abort it. The sleep level is 1: level 2 would lose the weights, and not every wake
        is followed by a weight sync."""
        await self._note_peak()  # sleep resets it
        if self.options.enable_sleep and self.options.on_gpu:
            await self._bounded(self.llm.sleep(level=1))
        self.asleep = TAGS

    async def wake(self, tags: list[str]) -> None:
        if self.options.enable_sleep and self.options.on_gpu:
            await self._bounded(self.llm.wake_up(tags))
        self.asleep -= set(tags)
        if not self.asleep:
            await self._bounded(self.llm.resume_generation())

    def _require_awake(self, tags: Set[str]) -> None:
        if missing := self.asleep & tags:
            raise RuntimeError(f"an engine was called while its {' and '.join(sorted(missing))} slept")

    def shutdown(self) -> None:
        if (handler := self.llm.output_handler) is not None:
            library().cancel_task_threadsafe(handler)  # else it reports the end of the core as an error
        self.llm.shutdown()
        del self.llm  # its destructor would fail at interpreter exit
        gc.collect()

    async def _bounded(self, call: Awaitable) -> Any:
        """Returns the result of a control-plane call. Raises EngineDied if the engine dies, because the call
        would never return, and RunError after `options.timeout` seconds. The call then counts as under way
        forever, so that the watchdog of `progress` gives up the engine."""
        task, deadline = asyncio.ensure_future(call), time.monotonic() + self.options.timeout
        self.num_calls += 1
        task.add_done_callback(self._note_answer)
        while not (await asyncio.wait({task}, timeout=0.5))[0]:
            if self.llm.errored:
                task.cancel()
                raise EngineDied(ErrorCode.ENGINE_FAILED, str(self.llm.dead_error))
            if time.monotonic() > deadline:
                text = f"a vLLM engine did not answer a control call for {self.options.timeout:.0f} s"
                raise RunError(ErrorCode.ENGINE_FAILED, text)
        with _converted_errors():
            return task.result()  # bounded: it is done

    def _note_answer(self, call: asyncio.Future) -> None:
        self.num_calls -= 1
        self.num_outputs += 1
