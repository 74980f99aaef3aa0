import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pydantic
import pytest
import torch
from refusals import refused
from vllm.config import SpeculativeConfig
from vllm.config.lora import MaxLoRARanks

from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import (
    CPU_KV_CACHE_GB,
    VLLMEngine,
    _lora_arguments,
    _speculation_options,
    engine_environment,
    refusals,
)
from openrlhf.backends.vllm.weight_receiver import CheckedRay, WorkerExtension
from openrlhf.backends.weight_sync.checksum import Checksum
from openrlhf.backends.weight_sync.stored_weights import EngineProbe
from openrlhf.completions import SamplingParams
from openrlhf.config import choices
from openrlhf.config.choices import VLLM_LORA_RANKS
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig, ChatVllmConfig, InferenceVllmConfig
from openrlhf.config.ppo import ActorConfig, PPOConfig, VllmConfig
from openrlhf.config.sections import LoraConfig, ScorerDeepSpeedConfig
from openrlhf.errors import ErrorCode
from openrlhf.models.configurations import DTYPES
from openrlhf.rollout.worker import engine_options
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.types import not_none

FLAGS = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "kv_cache_gb": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(vllm=VllmConfig(**FLAGS)),
        BatchInferenceConfig(vllm=InferenceVllmConfig(**FLAGS)),
        ChatConfig(vllm=ChatVllmConfig(**FLAGS)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_command_hands_its_flags_on(config):
    options = EngineOptions.of(config, model="m", max_len=7, on_gpu=False, enable_prefix_caching=True)
    assert options == EngineOptions(
        model="m",
        dtype=config.ds.param_dtype,
        max_len=7,
        seed=config.train.seed,
        transfer_backend="gloo",
        on_gpu=False,
        enable_prefix_caching=True,
        **FLAGS,
    )


@pytest.mark.parametrize(("asked", "expected"), [(None, 4), (2, 2)])
def test_an_engine_takes_all_gpus_unless_told_otherwise(monkeypatch, asked, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = ChatConfig(vllm=ChatVllmConfig(tensor_parallel_size=asked))
    options = EngineOptions.of(config, model="m", max_len=7, on_gpu=True)
    assert (options.tensor_parallel_size, options.transfer_backend) == (expected, "nccl")


def test_the_engines_of_a_run_start_without_weights_and_take_them_as_the_run_sends_them():
    config = PPOConfig()
    shared = replace(config, train=replace(config.train, colocate_all=True))
    assert engine_options(config, on_gpu=True).transfer_backend == "nccl"
    assert engine_options(shared, on_gpu=True).transfer_backend == "ipc"
    assert engine_options(shared, on_gpu=False).transfer_backend == "gloo"
    by_ray = replace(shared, vllm=replace(shared.vllm, sync_with_ray=True))
    assert {engine_options(by_ray, on_gpu=on_gpu).transfer_backend for on_gpu in (True, False)} == {"ray"}
    assert not engine_options(config, on_gpu=True).load_weights
    assert engine_options(config, on_gpu=True, from_files=True).load_weights
    assert [engine_options(config, on_gpu=on_gpu).float32_head for on_gpu in (True, False)] == [True, False]


def test_only_engines_on_the_trainers_gpus_unpickle_what_their_socket_brings(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    config = PPOConfig()
    shared = replace(config, train=replace(config.train, colocate_all=True))
    allowed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    assert allowed.items() <= engine_environment(engine_options(shared, on_gpu=True)).items()
    for other in (engine_options(config, on_gpu=True), engine_options(shared, on_gpu=False)):
        assert not allowed.keys() & engine_environment(other).keys()


def test_engines_on_a_cpu_take_memory_in_large_pages(monkeypatch):
    """Large pages are the default; glibc settings of the user stay."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    on_cpu, on_gpu = (engine_options(PPOConfig(), on_gpu=on_gpu) for on_gpu in (False, True))
    assert engine_environment(on_cpu)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "GLIBC_TUNABLES" not in engine_environment(on_gpu)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert engine_environment(on_cpu)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


class AwakeLLM:
    """Engine with the calls that change weights and sleep."""

    errored = False

    def __init__(self, *peaks):
        self.calls, self.arguments, self.peaks = [], [], iter(peaks)

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append(name)
            self.arguments.append(kwargs)
            return next(self.peaks, None) if name == "collective_rpc" else True

        return call


def test_an_engine_that_is_ended_reports_no_error():
    """vLLM ends its core before the task that waits for the core's output, which would report the end."""

    class EndedLLM:
        def __init__(self):
            self.outputs, self.reported = asyncio.Queue(), []
            self.output_handler = asyncio.create_task(self.handle())

        async def handle(self):
            try:
                raise await self.outputs.get()
            except Exception as error:
                self.reported.append(error)

        def shutdown(self):
            loop = self.output_handler.get_loop()
            loop.call_soon_threadsafe(self.outputs.put_nowait, RuntimeError("the core is gone"))
            time.sleep(0.2)
            loop.call_soon_threadsafe(self.output_handler.cancel)

    async def work():
        llm = engine.llm = EndedLLM()
        await asyncio.to_thread(engine.shutdown)
        await asyncio.wait({llm.output_handler})
        return llm.reported

    engine = VLLMEngine(engine_options(PPOConfig(), on_gpu=False))
    assert asyncio.run(work()) == []


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_sleeping_engine_refuses_work(on_gpu):
    """A sleeping engine refuses work without a GPU too, where it keeps its memory: a run that asks too early
    fails there as well."""

    async def work():
        await engine.sleep()
        with pytest.raises(RuntimeError, match=r"kv_cache\b.*\bweights"):
            await engine.generate([1], None)
        with pytest.raises(RuntimeError, match="its weights"):
            await engine.start_weight_update()
        await engine.wake(["weights"])
        await engine.start_weight_update()
        await engine.finish_weight_update("1")
        with pytest.raises(RuntimeError, match="its kv_cache "):
            await engine.probe([1, 2])
        assert "resume_generation" not in engine.llm.calls  # vLLM would schedule into a cache that is gone
        await engine.wake(["kv_cache"])

    engine = VLLMEngine(EngineOptions.of(PPOConfig(), model="m", max_len=7, on_gpu=on_gpu, enable_sleep=True))
    engine.llm = AwakeLLM([3, 2])
    asyncio.run(work())
    update = ["pause_generation", "start_weight_update", "finish_weight_update", "reset_prefix_cache"]
    of_gpus = ["sleep", "wake_up", *update, "wake_up", "resume_generation"]
    calls = of_gpus if on_gpu else [*update, "resume_generation"]
    assert engine.llm.calls == ["collective_rpc", *calls]


def test_an_engine_remembers_what_generation_needed_before_it_slept():
    """There are two workers and two phases in a step; a step without generation has nothing to report."""

    async def work():
        for _ in range(2):
            await engine.sleep()
            assert engine.asleep
            await engine.wake(["weights", "kv_cache"])
        await engine.sleep()
        told = [await engine.peak_memory(), await engine.peak_memory()]
        await engine.wake(["weights", "kv_cache"])
        return [*told, await engine.peak_memory()]

    options = EngineOptions.of(PPOConfig(), model="m", max_len=7, on_gpu=True, enable_sleep=True)
    engine = VLLMEngine(options)
    engine.llm = AwakeLLM([3, 5], [2, 4], [1, 1], [2, 6])
    assert asyncio.run(work()) == [{"generate": 5}, {}, {"generate": 6}]


def engine_of(**options):
    engine = VLLMEngine(EngineOptions.of(PPOConfig(), model="m", max_len=7, on_gpu=False, **options))
    engine.llm = AwakeLLM()
    return engine


async def synced(engine):
    await engine.start_weight_update()
    await engine.finish_weight_update("1")


def test_a_control_call_without_an_answer_is_work_without_progress():
    """It stays so after the call has failed: the weight sync may wait for the engine's connection to end."""

    async def work():
        before = engine.progress()
        with refused(ErrorCode.ENGINE_FAILED):
            await engine._bounded(asyncio.sleep(100))
        assert engine.progress() == (before[0], True)

    engine = engine_of(timeout=0.1)
    asyncio.run(work())


def test_control_calls_that_are_answered_are_progress():
    engine = engine_of()
    asyncio.run(synced(engine))
    number, is_busy = engine.progress()
    assert number == len(engine.llm.calls) and not is_busy


@pytest.mark.parametrize("keep_cache", [False, True])
def test_new_requests_find_no_blocks_of_old_weights(keep_cache):
    """No blocks are left, or those that are left have another salt."""
    engine = engine_of(keep_cache=keep_cache)
    before = engine._prompt([1])
    asyncio.run(synced(engine))
    after = engine._prompt([1])
    assert ("reset_prefix_cache" in engine.llm.calls) == (not keep_cache)
    assert (before.get("cache_salt") != after.get("cache_salt")) == keep_cache


def test_requests_have_the_adapter_once_it_has_come():
    engine = engine_of(lora=LoraConfig(rank=12, alpha=24, target_modules=("q_proj",)))
    assert engine.adapter is None
    asyncio.run(synced(engine))
    assert engine.adapter is not None and engine.adapter.lora_int_id == 1
    sent = engine.llm.arguments[engine.llm.calls.index("collective_rpc")]
    config = {"r": 12, "lora_alpha": 24, "target_modules": ["q_proj"]}
    assert sent == {"args": (engine.adapter.lora_int_id, config)}
    update = ["pause_generation", "start_weight_update", "finish_weight_update", "collective_rpc"]
    assert engine.llm.calls == [*update, "reset_prefix_cache", "resume_generation"]


def test_a_probe_asks_for_the_log_probs_of_its_own_tokens():
    """The engine samples one token, which nobody reads."""
    asked = []

    async def answer(token_ids, params, images):
        asked.append((params.max_tokens, params.prompt_logprobs, params.temperature, images))
        of = [None, {5: SimpleNamespace(logprob=-1.0)}, {6: SimpleNamespace(logprob=-2.0), 9: None}]
        output = SimpleNamespace(weight_versions=[SimpleNamespace(version="3"), SimpleNamespace(version="4")])
        return SimpleNamespace(prompt_token_ids=token_ids, prompt_logprobs=of, outputs=[output])

    engine = engine_of()
    engine._answer = answer
    assert asyncio.run(engine.probe([4, 5, 6])) == EngineProbe(log_probs=[-1.0, -2.0], version=4)
    assert asked == [(1, 0, 0.0, None)]


def test_requests_name_the_adapter():
    """vLLM applies an adapter only where the request names it."""
    named = []

    async def generate(prompt, params, *, request_id, lora_request=None):
        named.append(lora_request)
        yield "an answer"

    async def work():
        await engine._answer([1], SamplingParams())
        await synced(engine)
        await engine._answer([1], SamplingParams())

    engine = engine_of(lora=LoraConfig(rank=12, alpha=24, target_modules=("q_proj",)))
    engine.llm.generate = generate
    asyncio.run(work())
    assert named == [None, engine.adapter]


class Worker(WorkerExtension):
    """A worker of vLLM that remembers the adapters that it should load."""

    def __init__(self, adapter):
        self.weight_transfer_engine = SimpleNamespace(adapter=adapter)
        self.requests = []
        self.add_lora = self.requests.append


def test_a_worker_loads_the_adapter_of_every_sync():
    """vLLM ignores a request with a known number unless it asks for the adapter to be replaced."""
    worker = Worker({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)})
    for _ in range(2):
        worker.use_adapter(1, {"r": 2})
    assert [(request.lora_int_id, request.load_inplace) for request in worker.requests] == [(1, True)] * 2


def test_an_adapter_does_not_share_the_memory_it_was_received_in():
    """The next bucket may overwrite it."""
    receiver, name = object.__new__(CheckedRay), "base_model.model.q_proj.lora_A.weight"
    receiver.checksum, receiver.adapter = Checksum(), {}
    received = torch.ones(2, 3)
    receiver._load([(name, received)])
    received.zero_()
    assert torch.equal(receiver.adapter[name], torch.ones(2, 3))


def test_vllm_makes_room_for_an_adapter_of_the_next_larger_rank():
    assert get_args(MaxLoRARanks) == VLLM_LORA_RANKS
    asked = _lora_arguments(LoraConfig(rank=12, target_modules=("q_proj", "up_proj")))
    assert asked == {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": ["q_proj", "up_proj"]}
    assert _lora_arguments(LoraConfig(rank=512))["max_lora_rank"] == 512
    assert _lora_arguments(None) == {}


def test_adapters_are_merged_unless_they_are_to_stay_apart(tmp_path):
    tiny_model(tiny_tokenizer()).save_pretrained(tmp_path)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path)))
    adapted = replace(config, ds=replace(config.ds, lora=LoraConfig(rank=4, target_modules=("v_proj",))))
    apart = VllmConfig(lora_sync="adapter", keep_cache=True)
    assert engine_options(config, on_gpu=False).lora is None
    assert engine_options(adapted, on_gpu=False).lora is None
    assert engine_options(replace(config, vllm=apart), on_gpu=False).lora is None
    options = engine_options(replace(adapted, vllm=apart), on_gpu=False)
    assert options.lora == adapted.ds.lora and options.keep_cache


def test_a_draft_model_is_loaded_even_while_the_policy_has_no_weights():
    config = PPOConfig(vllm=VllmConfig(speculative="ngram:3"))
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert _speculation_options(engine_options(config, on_gpu=False, from_files=True)) == ngram
    without = _speculation_options(engine_options(config, on_gpu=False))
    assert without == ngram | {"draft_load_config": {"load_format": "auto"}}
    assert _speculation_options(engine_options(PPOConfig(), on_gpu=False)) is None


def test_what_vllm_refuses_names_the_flag():
    options = engine_options(PPOConfig(vllm=VllmConfig(speculative="ngrm:3")), on_gpu=False)
    speculation = not_none(options.speculation)
    flag = {"flag": "--vllm.speculative", "value": json.dumps(speculation)}
    with refused(ErrorCode.UNSUPPORTED, **flag) as refusal, refusals(options):
        SpeculativeConfig(**speculation)
    assert "vLLM refuses it: Input should be " in str(refusal.value)
    without = engine_options(PPOConfig(), on_gpu=False)
    with pytest.raises(ValueError, match="other"), refusals(without):
        raise ValueError("other")


def test_a_model_that_vllm_refuses_is_told_with_its_flag():
    options = replace(engine_options(PPOConfig(), on_gpu=False), model="own/model")

    @pydantic.dataclasses.dataclass
    class ModelConfig:
        architecture: str

        @pydantic.model_validator(mode="after")
        def check(self):
            raise ValueError("Model architectures ['Own'] are not supported. Supported architectures: A, B")

    model = {"flag": "--actor.model_name_or_path", "value": "own/model"}
    with refused(ErrorCode.UNSUPPORTED, **model) as refusal, refusals(options):
        ModelConfig(architecture="Own")
    assert str(refusal.value).endswith(
        "vLLM does not run this model: Model architectures ['Own'] are not supported."
    )
    chat = replace(options, model_flag="--model.model_name_or_path")
    with refused(ErrorCode.UNSUPPORTED, flag=chat.model_flag, value="own/model"), refusals(chat):
        ModelConfig(architecture="Own")
    with pytest.raises(pydantic.ValidationError), refusals(options):  # not the model's fault
        SpeculativeConfig(method="other")


@pytest.mark.parametrize("name", get_args(choices.ParamDtype))
def test_the_sampler_has_the_precision_of_the_trainer(monkeypatch, name):
    """Weights of another precision could not be loaded bit by bit: fp16 is no exception."""

    class Started(Exception):
        pass

    class Arguments:
        def __init__(self, dtype: str, *, kv_cache_memory_bytes: int, **options) -> None:
            raise Started(dtype, kv_cache_memory_bytes)

    names = SimpleNamespace(
        AsyncEngineArgs=Arguments,
        WeightTransferConfig=lambda **options: None,
        UsageContext=None,
        AsyncLLM=None,
    )
    monkeypatch.setattr("openrlhf.backends.vllm.engine.library", lambda: names)
    config = replace(PPOConfig(), ds=ScorerDeepSpeedConfig(param_dtype=name))
    with pytest.raises(Started) as started:
        asyncio.run(VLLMEngine(engine_options(config, on_gpu=False)).start())
    dtype, cache = started.value.args
    assert getattr(torch, dtype) is DTYPES[name] and cache == CPU_KV_CACHE_GB * 2**30
