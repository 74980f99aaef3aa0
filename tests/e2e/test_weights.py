"""Weight syncs from DeepSpeed to vLLM, with the real libraries at both ends."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from families import FAMILIES, tiny_family

from openrlhf.backends.distributed import free_port
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import engine_environment


@pytest.mark.parametrize("backend", ["deepspeed", pytest.param("torch", marks=pytest.mark.slow)])
def test_ranks_send_what_the_checkpoint_held(tmp_path: Path, run_worker: Callable, backend: str) -> None:
    """Weights are sharded over two ranks and travel in buckets smaller than most of them. The export holds
    them too, and adapters of their own."""
    families = ("Qwen3", "Mixtral", "Glm4Moe")
    models = [str(tiny_family(tmp_path / family, family)) for family in families]
    for rank in run_worker("full_weights", 2, models=models, backend=backend, bucket_bytes=10_000):
        assert rank.keys() == {*families, "adapters"}
        for family, found in rank.items():
            assert found["count"] > 20 and not found["wrong"] and found["as announced"], (family, found)


ON_CPU = EngineOptions(model="", dtype="fp32", max_len=256, seed=0, transfer_backend="gloo", on_gpu=False)


@pytest.fixture
def engine_variables(cpu_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets variables for workers with an engine in their process."""
    for name, value in engine_environment(ON_CPU).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def sync(engine_variables: None, tmp_path: Path, run_worker: Callable) -> Callable[..., dict]:
    """Returns a function that reports the check's verdict on an engine after a sync with each fault, and
    after a last one without a fault."""

    def run(family: str, dtype: str, faults: list[str], **more: str) -> dict:
        model = str(tiny_family(tmp_path / family, family))
        return run_worker("stored_weights", 1, model=model, dtype=dtype, faults=faults, **more)[0]

    return run


NOT_THE_POLICY = "does not compute with the weights that the trainer sent"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("family", "fault", "reason"),
    [
        ("Qwen3", "head", "keeps a copy of some weights"),
        pytest.param("Mixtral", "experts", "keeps a copy of some weights", marks=pytest.mark.slow),
        pytest.param("Glm4Moe", BIAS, f"did not write {BIAS}", marks=pytest.mark.slow),
    ],
)
def test_what_an_engine_stored_is_compared(sync: Callable, family: str, fault: str, reason: str) -> None:
    """The checksum is right even if the head or the experts are not packed again, or a tensor is skipped; the
    check finds these faults."""
    projection = "layers.0.self_attn.o_proj"
    verdicts = sync(family, "fp32", [fault, "", projection])
    assert NOT_THE_POLICY in verdicts[fault] and reason in verdicts[fault]
    assert NOT_THE_POLICY in verdicts[projection]
    assert verdicts[""] == "" == verdicts["after"]


LOST_BY_VLLM = {"GptOss": "did not write model.layers.0.attn.sinks"}
"""Architectures whose weights vLLM cannot take a second time: its loader copies a tensor past its own
reloading."""
OTHERWISE_ON_CPU = {"DeepseekV2", "DeepseekV3", "Ernie4_5_Moe", "MiniMaxM2", "Phimoe"}
"""Architectures that vLLM on CPU does not run, cannot reload, or computes differently even as loaded from
disk: it routes Ernie's tokens without the experts' correction."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((f, "fp32") for f in FAMILIES if f not in OTHERWISE_ON_CPU), ("Qwen3", "bf16"), ("Qwen3Moe", "bf16")],
)
def test_vllm_computes_with_what_was_sent(sync, monkeypatch, family, dtype):
    # vLLM patches transformers' own models in its process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    verdicts = sync(family, dtype, [""])
    if family in LOST_BY_VLLM:
        assert LOST_BY_VLLM[family] in verdicts[""]
    else:
        assert verdicts == {"": "", "after": ""}


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "sampled"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")])
def test_an_engine_takes_weights_of_another_type(sync: Callable, trained: str, sampled: str) -> None:
    """The engine rounds them itself: the checksum covers what was sent."""
    assert sync("Qwen3", trained, [""], engine_dtype=sampled) == {"": "", "after": ""}


@pytest.mark.slow
@pytest.mark.usefixtures("engine_variables")
@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_request_that_a_sync_pauses(tmp_path: Path, run_worker: Callable, keep_cache: bool) -> None:
    """A paused request goes on with the new weights and recomputes the keys and values of all its tokens;
    with `keep_cache` it keeps those of the old weights. No other request reads these."""
    model = str(tiny_family(tmp_path / "Qwen3", "Qwen3"))
    (found,) = run_worker("paused_requests", 1, model=model, keep_cache=keep_cache)
    (old, before), (new, after) = found["versions"]
    assert (old, new) == (1, 2) and before >= 20 and after > 20 and before + after == 100
    assert found["old"] < 1e-4
    assert found["new"] > 0.1 if keep_cache else found["new"] < 1e-4
    assert found["new versions"] == [[2, 8]] and found["of new requests"] < 1e-4
    # The cached block is what the request computed anew, or what the first new request did.
    assert found["cached"] == ([0, 128] if keep_cache else [128, 128])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "heads", "shards", "stages"),
    [
        ("Qwen3", (4, 1), 2, 1),  # tied; both workers hold the one head of keys and values
        ("Qwen2Moe", (2, 2), 2, 1),
        ("Qwen3", (2, 2), 1, 2),
    ],
)
def test_an_engine_of_several_workers(
    cpu_engines: None,
    tmp_path: Path,
    run_worker: Callable,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    heads: tuple[int, int],
    shards: int,
    stages: int,
) -> None:
    """Each worker loads its part of the weights that all receive, and its checksum covers the whole; together
    they compute what the trainer does, with the first weights and with the next."""
    own = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model = str(tiny_family(tmp_path / family, family, **own))
    options = replace(ON_CPU, tensor_parallel_size=shards, pipeline_parallel_size=stages)
    for name, value in engine_environment(options).items():
        monkeypatch.setenv(name, value)
    (found,) = run_worker("sharded_engine", 1, model=model, shards=shards, stages=stages)
    assert found["workers"] == 2 and not found["unwritten"]
    assert max(found["differences"]) < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(("dies", "process"), [(0, "actor"), (1, "core")])
def test_an_engine_that_dies_in_a_sync(tmp_path: Path, run_worker: Callable, dies: int, process: str) -> None:
    """The dead engine is named within seconds, and the other one has the new weights."""
    model = str(tiny_family(tmp_path / "Qwen3", "Qwen3"))
    (found,) = run_worker("dying_engine", 1, model=model, dies=dies, process=process)
    failed, engine, log = found["told"].splitlines()
    assert re.search(rf"\bsync 2\b.*\b{1 - dies}$", failed)
    assert engine.startswith(f"inference engine {dies}: ") and re.search(r"\S/\S", log)
    assert found["seconds"] < 15
    assert found["version"] == "2" and found["difference"] < 1e-4


SHARED = EngineOptions(model="", dtype="bf16", max_len=256, seed=0, transfer_backend="ipc", on_gpu=True)


@pytest.mark.parametrize(
    ("num_ranks", "times", "largest", "layer", "buffer"),
    [
        (2, 2, 20, 2, (28 << 20) + 256),
        # MiB: an embedding that is larger than a bucket
        pytest.param(1, 1, 700, 50, 700 << 20, marks=pytest.mark.slow),
    ],
)
def test_engines_on_the_trainers_gpus_take_weights_from_shared_memory(
    run_worker: Callable, num_ranks: int, times: int, largest: int, layer: int, buffer: int
) -> None:
    """Each engine reads the memory of its own GPU, after all ranks have filled theirs; vLLM passes on the
    handle of such memory only because a variable allows it."""
    given = {"backend": "ipc", "times": times, "largest": largest, "layer": layer}
    environment = engine_environment(SHARED)
    ranks = run_worker("gpu_transfers", num_ranks, port=free_port(), environment=environment, **given)
    first, count = ranks[0], ranks[0]["tensors"] * times
    assert all(rank["gathered"] == count and rank["buffer"] == buffer for rank in ranks)
    assert first["loaded"] == [count] * num_ranks and first["wrong"] == [[]] * num_ranks
    assert sorted(first["opened"]) == sorted([[i, f"gpu{i}"] for i in range(num_ranks)] * times)
    assert "is not serializable" in first["refused"]


def test_engines_on_other_gpus_take_weights_from_the_network(run_worker: Callable) -> None:
    """Two engines of two workers join, each worker at a rank of its own; buckets end with the tensor that
    fills them."""
    (found,) = run_worker("gpu_transfers", 1, backend="nccl", port=free_port(), times=2, unknown="")
    assert found["groups"] == [[rank, 5] for rank in range(5)]
    assert found["loaded"] == [12] * 4 and found["wrong"] == [[]] * 4 and not found["said"]
    layer = 18 << 20
    assert found["sizes"] == [132 + (160 << 20), 4 * layer] * 2


def test_a_sender_does_not_wait_for_an_engine_that_has_failed(run_worker: Callable) -> None:
    """One of four workers does not know the last tensor; the others would take it."""
    with pytest.raises(AssertionError, match=r"ended with \[1\][\s\S]*KeyError: 'embed'"):
        run_worker("gpu_transfers", 1, backend="nccl", port=free_port(), times=1, unknown="embed")


def test_vllm_takes_the_options_of_a_run_on_shared_gpus(tmp_path: Path, run_worker: Callable) -> None:
    """Options set batch sizes for throughput, a float32 head beside bf16 weights, and the memory that is
    left. What is passed through wins."""
    model = str(tiny_family(tmp_path / "Qwen3", "Qwen3"))
    passed = {"max_num_batched_tokens": 8192}
    options = asdict(replace(SHARED, model=model, float32_head=True, engine_args=passed))
    (found,) = run_worker("engine_config", 1, options=options, free_fraction=0.5)
    assert found == {"head": "torch.float32", "sequences": 1024, "tokens": 8192, "memory": 0.475}
