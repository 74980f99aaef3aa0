"""`openrlhf plan`: numbers by hand, the parts of a run's own estimate, and suggestions that fit."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import refusals
import torch
import transformers as hf
from kept_memory import TOKENS, kept_bytes

from openrlhf.algorithms.logprobs import logits_bytes
from openrlhf.config.commands import DPO, PPO, SFT
from openrlhf.config.fields import flag_values, with_values
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ErrorCode
from openrlhf.memory.training import training_memory
from openrlhf.models.attention import PACKED
from openrlhf.models.sizes import model_size
from openrlhf.tools.command_line.run_files import command_and_flags
from openrlhf.tools.plan import flags
from openrlhf.tools.plan.estimate import Assumed, RunPlan, _remedies, plan_run, spelled
from openrlhf.tools.plan.hardware import REPORTED, Cluster, cores, parse_cluster, with_measured
from openrlhf.tools.plan.time import forward_flops, largest_batch, training_flops
from openrlhf.tools.plan.view import batch_lines, show

LLAMA_8B = hf.LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
LLAMA_70B = hf.LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
SIZES: dict[str, Any] = {"head_dim": 128}
MOE = hf.Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    **SIZES,
)
TINY = hf.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
MODELS = {"8b": LLAMA_8B, "70b": LLAMA_70B, "moe": MOE, "tiny": TINY}
FLAG = "--model.model_name_or_path"
B8 = 8_030_261_248
"""Parameters of Llama 3 8B: 2 V H of embedding and head, H (2 H + 2 H / 4 + 3 I) and two norms of H in each
of 32 layers, and a last norm."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config.save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


def ppo_flags(model: str, **more: Any) -> list[str]:
    flags = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": "org/rows",
        "reward.remote_url": "http://127.0.0.1:5000",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": "0",
        "rollout.n_samples_per_prompt": "8",
        "rollout.batch_size": "128",
        "train.batch_size": "1024",
        "train.colocate_all": "true",
    }
    return [word for key, value in (flags | more).items() for word in (f"--{key}", str(value))]


def planned(words: list[str], cluster: Cluster, command: Any = PPO, **assumed: int) -> tuple[Any, RunPlan]:
    config = flags.invocation(command, words, cluster).config
    return config, plan_run(command, config, cluster, Assumed(**assumed))


# ---- models


def test_parameters_by_hand(folders: dict[str, str]) -> None:
    v, h, i = 128256, 4096, 14336
    layer = h * (2 * h + 2 * h // 4 + 3 * i) + 2 * h
    assert 2 * v * h + 32 * layer + h == B8
    size = model_size(folders["8b"], FLAG)
    assert size.parameters == B8 and size.head == size.embedding == v * h
    assert size.active == B8 - v * h
    assert size.kv_bytes(2) == 2 * 32 * 1024 * 2
    assert size.adapted == 32 * (2 * 2 * h + 2 * (h + h // 4) + 3 * (h + i))
    assert size.scorer().parameters == B8 - v * h + h


def test_experts_by_hand(folders: dict[str, str]) -> None:
    size = model_size(folders["moe"], FLAG)
    assert size.experts == 48 * 128 * 3 * 2048 * 768
    assert size.expert_share == 8 / 128
    assert size.parameters == pytest.approx(30.5e9, rel=0.01)
    assert size.active == pytest.approx(3.0e9, rel=0.03)  # 3.3 B with the embedding
    assert size.read_by(0) == pytest.approx(size.active - size.experts / 16)
    assert size.read_by(1) == pytest.approx(size.active)
    assert size.read_by(10**4) == pytest.approx(size.parameters - size.embedding)


# ---- memory


def test_sixteen_bytes_of_a_parameter_in_mixed_precision(folders: dict[str, str]) -> None:
    """Stage 3 divides 2 bytes of bf16, 4 of a float32 gradient, and 12 of the optimizer by the ranks."""
    ds = DeepSpeedConfig(zero_stage=3, param_dtype="bf16")
    shape = model_size(folders["8b"], FLAG).on_rank(ds, "deepspeed", trained=True)
    parts = training_memory(shape, ds, "deepspeed", 8192, True, ranks=64, gpu=80 * 2**30).parts
    assert parts["weights"] == 2 * B8 // 64
    assert parts["gradients"] == 4 * (B8 // 64)
    assert parts["optimizer"] == 12 * (B8 // 64)
    assert parts["buffers"] == 2 * 10**9 + 2 * 500_000_000
    # The inputs of 32 layers, and one layer recomputed with the gradients of its MLP.
    kept = 8192 * 32 * 4096 * 2
    layer = 2 * 4096 * 8 + (3 * 4096 + 2 * 1024) * 2 + 4 * 14336 * 2 + 3 * 14336 * 2 + 4 * 4096
    assert parts["activations"] + parts["logits"] == kept + max(
        8192 * layer,
        8192 * 4096 * 14 + 4 * 128256 * 4096 + max(logits_bytes(80 * 2**30) * 3 // 2, 128256 * 4096 * 2),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gpu", [None, 80 * 2**30])
def test_parts_add_up_to_the_estimate_of_a_run(folders: dict[str, str], stage: int, gpu: int | None) -> None:
    ds = DeepSpeedConfig(zero_stage=stage)
    shape = model_size(folders["8b"], FLAG).on_rank(ds, "deepspeed", trained=True)
    whole = training_memory(shape, ds, "deepspeed", 4096, True, ranks=8, gpu=gpu)
    assert sum(whole.parts.values()) == whole.total


def test_adapters_and_4_bits_by_hand(folders: dict[str, str]) -> None:
    ds = with_values(DeepSpeedConfig(), {"lora.rank": 16, "load_in_4bit": True})
    size = model_size(folders["8b"], FLAG)
    shape = size.on_rank(ds, "deepspeed", trained=True)
    assert shape.trainable == 16 * size.adapted
    kept = 2 * (B8 - size.linear)
    assert shape.weight_bytes == pytest.approx(0.516 * size.linear + kept + 32 * size.adapted, rel=1e-3)


def test_float32_on_a_cpu_against_a_pass(folders: dict[str, str]) -> None:
    """Weights, gradients and AdamW's states are exact at stage 0, where weights are their own master. A pass
    keeps what its layers keep and the last norm; each of five norms and four heads of attention also keeps a
    float32 number of a token, which the prediction leaves out."""
    ds = DeepSpeedConfig(zero_stage=0, param_dtype="fp32")
    shape = model_size(folders["tiny"], FLAG).on_rank(ds, "deepspeed", trained=True)
    said = training_memory(shape, ds, "deepspeed", TOKENS, False).parts
    model = hf.AutoModelForCausalLM.from_config(TINY, attn_implementation=PACKED)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights)
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert said["weights"] == said["gradients"] == sum(p.nbytes for p in weights)
    assert said["optimizer"] == sum(x.nbytes for x in states)
    layer = 2 * 32 * 12 + 5 * 32 * 4 + 4 * 64 * 4
    kept = kept_bytes(model)
    assert kept == pytest.approx(TOKENS * (2 * layer + 32 * 12 + 4 * (5 + 4)), rel=0.003)
    assert kept <= said["activations"] < 1.1 * kept


@pytest.mark.parametrize(("dtype", "starved"), [("bf16", False), ("fp32", True)])
def test_a_kv_cache_has_the_dtype_of_the_model(folders: dict[str, str], dtype: str, starved: bool) -> None:
    """A sequence of 2,048 tokens has 0.25 GiB of keys and values in bf16."""
    flags = {"vllm.kv_cache_gb": 0.3, "ds.param_dtype": dtype}
    _, plan = planned(ppo_flags(folders["8b"], **flags), parse_cluster("8xH100-80GB"))
    assert plan.lengths.prompt + plan.lengths.longest <= 2048
    assert plan.starved is starved


def test_all_reward_models_are_in_memory(folders: dict[str, str]) -> None:
    flags = {"algo.kl.init_coef": 0, "reward.model_name_or_path": f"{folders['8b']},{folders['8b']}"}
    words = [word for word in ppo_flags(folders["tiny"], **flags) if "remote_url" not in word]
    words.remove("http://127.0.0.1:5000")
    _, plan = planned(words, parse_cluster("8xH100-80GB"))
    sampling = next(demand for demand in plan.memory if demand.phase == "generate")
    scorer, tiny = B8 - 128256 * 4096 + 4096, plan.sizes["actor"].parameters
    assert plan.sizes["reward"].parameters == 2 * scorer
    assert sampling.parts["weights"] == 2 * (2 * scorer + 2 * tiny)  # also of the actor and its engine


@pytest.mark.parametrize(
    ("more", "bucket"),
    [
        ({}, 128256 * 4096 * 2),  # the embedding does not fit the default of 512 MiB
        ({"vllm.sync_bucket_mb": 2048}, 2 << 30),
        ({"vllm.sync_with_ray": "true"}, 128256 * 4096 * 2),
    ],
)
def test_a_weight_sync_has_buckets_of_its_transport(
    folders: dict[str, str], more: dict[str, Any], bucket: int
) -> None:
    _, plan = planned(ppo_flags(folders["8b"], **more), parse_cluster("8xH100-80GB"))
    sync = next(demand for demand in plan.memory if demand.phase == "sync")
    assert sync.parts["buffers"] == 4 * bucket
    _, plan = planned(ppo_flags(folders["tiny"], **more), parse_cluster("8xH100-80GB"))
    sync = next(demand for demand in plan.memory if demand.phase == "sync")
    assert sync.parts["buffers"] == 4 * 2 * plan.sizes["actor"].parameters


# ---- time


def test_operations_by_hand(folders: dict[str, str]) -> None:
    size = model_size(folders["8b"], FLAG)
    assert forward_flops(size, 1000, 0) == 2 * (B8 - 128256 * 4096) * 1000
    attention = forward_flops(size, 1, 2048) - forward_flops(size, 1, 0)
    assert attention == 2 * 32 * 4096 * 2048
    assert training_flops(size, 10, 8, checkpointing=True) == 4 * forward_flops(size, 10, 8)
    assert training_flops(size, 10, 8, checkpointing=False) == 3 * forward_flops(size, 10, 8)


def test_seconds_of_an_sft_step_by_hand(folders: dict[str, str]) -> None:
    words = f"{FLAG} {folders['8b']} --data.dataset org/rows --data.output_key a --data.max_len 4096".split()
    words += ["--train.batch_size", "64", "--model.gradient_checkpointing_enable"]
    _, plan = planned(words, parse_cluster("8xH100"), SFT, response=2048)
    flops = 4 * 64 * 2048 * (2 * (B8 - 128256 * 4096) + 2 * 32 * 4096 * 2048)
    sent = 2 * 2 * B8 / (0.7 * 450e9)
    assert plan.time[0].seconds == pytest.approx(flops / (8 * 989.4e12 * 0.4) + sent)
    assert plan.time[1].seconds == pytest.approx(30 * B8 / 8 / (0.6 * 3350e9))


# ---- batches


def test_batches_by_hand(folders: dict[str, str]) -> None:
    words = ppo_flags(folders["8b"], **{"data.max_len": 4096, "train.batch_size": 256})
    words += [
        "--train.dynamic_batch_enable",
        "--train.max_tokens_per_gpu",
        "8192",
        "--ds.ring_attn_size",
        "2",
    ]
    cluster = parse_cluster("8xH100-80GB")
    _, plan = planned(words, cluster, prompt=500, response=1500, rows=1000)
    b = plan.batches
    assert (b.prompts, b.samples, b.updates, b.batch_size) == (128, 1024, 4, 256)
    assert (b.ranks, b.samples_per_rank, b.row_tokens) == (4, 64, 16384)
    assert b.rows_per_rank == 8  # 64 samples of 2,000 tokens, 8 in a row
    assert b.steps == 8


def test_lines_of_a_dataset_are_counted(folders: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a"}\n\n{"input": "b"}\n{"input": "c"}')
    words = f"{FLAG} {folders['tiny']} --data.dataset {file} --data.output_key a --train.batch_size 2".split()
    _, plan = planned([*words, "--train.max_epochs", "2"], parse_cluster("1xA10"), SFT)
    assert plan.batches.rows == 3 and plan.batches.steps == 4


# ---- clusters


def test_clusters_are_read() -> None:
    eight = parse_cluster("8x8xH100-80GB")
    assert (eight.nodes, eight.per_node, eight.kind.flops) == (8, 8, 989.4e12)
    assert eight.kind.memory == 80 * REPORTED and str(eight) == "8 x 8 H100 80 GB"
    assert parse_cluster("4xa100-40gb").kind.memory_rate == 1555e9
    assert parse_cluster("2xH100-NVL").kind.memory == 94 * REPORTED
    assert parse_cluster("128x8xB200").devices == 1024
    assert eight.rate_between(8) == 450e9 and eight.rate_between(9) == 50e9
    for wrong in ("8", "8x8", "0xH100", "8xH100-80", "8xQuantum9"):
        with refusals.refused(ErrorCode.INVALID_VALUE, flag="--cluster", value=wrong):
            parse_cluster(wrong)


@pytest.mark.parametrize(
    ("kind", "largest"), [("H100-80GB", 1024), ("A100-80GB", 256), ("L40S", 256), ("B200", 1024)]
)
def test_an_engine_samples_as_many_sequences_as_vllm_does_by_default(kind: str, largest: int) -> None:
    assert largest_batch(parse_cluster(f"8x{kind}").kind) == largest


def test_measured_rates_replace_the_data_sheet(tmp_path: Path) -> None:
    file = tmp_path / "gpu_report.json"
    stages = [
        {"stage": "facts", "figures": {"copy GB/s, read and written": 2800.0}},
        {"stage": "sft-0.6B", "figures": {"ours MFU, % of the data sheet": 31.0}},
    ]
    file.write_text(json.dumps({"rehearsal": False, "stages": stages}))
    kind = with_measured(parse_cluster("1xH100"), file).kind
    assert kind.memory_rate == 2.8e12 and kind.mfu == 0.31
    file.write_text(json.dumps({"rehearsal": True, "stages": stages}))
    with refusals.refused(ErrorCode.INVALID_VALUE, flag="--rates"):
        with_measured(parse_cluster("1xH100"), file)
    with refusals.refused(ErrorCode.NOT_FOUND, flag="--rates"):
        with_measured(parse_cluster("1xH100"), tmp_path / "none.json")


# ---- whole plans

SLEEP = {"vllm.enable_sleep": "true", "ds.enable_sleep": "true"}
LONG = {"data.max_len": 8192, "train.dynamic_batch_enable": "true", "train.max_tokens_per_gpu": 16384}


@pytest.mark.parametrize(
    ("model", "cluster", "more"),
    [
        ("8b", "8xH100-80GB", {}),
        ("8b", "8xA100-40GB", LONG),
        ("8b", "1xH200-141GB", SLEEP | {"train.batch_size": 128}),
        ("70b", "8x8xH100-80GB", {"actor.num_nodes": 8}),
        ("moe", "4x8xH100-80GB", LONG | {"actor.num_nodes": 4}),
        ("70b", "128x8xH100-80GB", LONG | {"actor.num_nodes": 128}),
    ],
)
def test_a_suggestion_fits(folders: dict[str, str], model: str, cluster: str, more: dict) -> None:
    described = parse_cluster(cluster)
    words = ppo_flags(folders[model], **more)
    config, plan = planned(words, described)
    assert not plan.fits
    found = plan.suggestion
    assert found is not None, f"nothing fits {model} on {cluster}"
    again, fitting = planned([*words, *spelled(found[0]).split()], described)
    assert fitting.fits and fitting.tightest.share <= fitting.tightest.limit
    for key, value in found[0]:
        fewer = with_values(again, {key: flag_values(config)[key]})
        needed = any(problem.fatal for problem in PPO.problems(fewer, {}))
        assert needed or value is False or not plan_run(PPO, fewer, described, Assumed()).fits, key


def test_the_cheapest_changes_come_first(folders: dict[str, str]) -> None:
    cluster = parse_cluster("8xH100-80GB")
    config, _ = planned(ppo_flags(folders["8b"]), cluster)
    assert [*_remedies(config, cluster)][:6] == [
        (("vllm.enable_sleep", True),),
        (("ds.enable_sleep", True),),
        (("actor.gradient_checkpointing_enable", True),),
        (("ds.bucket_mb", 100),),
        (("train.micro_batch_size", 1),),
        (("rollout.micro_batch_size", 1),),
    ]
    offloaded = {"ref.offload", "reward.offload", "teacher.offload"}
    assert offloaded <= {key for changes in _remedies(config, cluster) for key, value in changes if value}


def test_nothing_fits_a_70b_on_one_small_gpu(folders: dict[str, str]) -> None:
    cluster = parse_cluster("1xA10G")
    _, plan = planned(ppo_flags(folders["70b"], **{"train.batch_size": 128}), cluster)
    assert not plan.fits and plan.suggestion is None


def test_flags_change_the_memory_in_the_right_direction(folders: dict[str, str]) -> None:
    cluster = parse_cluster("8xH100-80GB")

    def total(phase: str, **more: Any) -> float:
        _, plan = planned(ppo_flags(folders["8b"], **more), cluster)
        return next(demand.total for demand in plan.memory if demand.phase == phase)

    plain = total("update", **SLEEP)
    assert total("update", **SLEEP, **{"ds.zero_stage": 3}) < plain
    assert total("update", **SLEEP, **{"actor.gradient_checkpointing_enable": "true"}) < plain
    assert total("update", **SLEEP, **{"data.max_len": 4096}) > plain
    assert total("update", **SLEEP, **{"algo.kl.init_coef": 0.01}) > plain  # a reference model beside it
    offloaded = {"algo.kl.init_coef": 0.01, "ref.offload": "true"}
    assert total("update", **SLEEP, **offloaded) < total("update", **SLEEP, **{"algo.kl.init_coef": 0.01})


def test_supervised_commands(folders: dict[str, str]) -> None:
    words = f"{FLAG} {folders['8b']} --data.dataset org/rows --train.batch_size 64".split()
    cluster = parse_cluster("8xH100-80GB")
    _, sft = planned([*words, "--data.max_len", "512", "--data.output_key", "a"], cluster, SFT)
    _, dpo = planned(words, cluster, DPO)
    assert dpo.sizes.keys() == {"model", "ref"} and dpo.batches.samples == 128
    weights = {plan.command.name: plan.memory[0].parts["weights"] for plan in (sft, dpo)}
    assert weights == {"sft": 2 * B8, "dpo": 4 * B8}
    assert SFTConfig().train.micro_batch_size == 8 and sft.batches.row_tokens == 8 * 512


def test_fewer_rows_than_a_batch(folders: dict[str, str]) -> None:
    """5 prompts of 8 samples: a step and its optimizer step have 40 samples, not 1,024."""
    cluster = parse_cluster("8xH100-80GB")
    _, few = planned(ppo_flags(folders["8b"], **SLEEP), cluster, rows=5)
    assert (few.batches.prompts, few.batches.samples, few.batches.batch_size) == (5, 40, 40)
    assert (few.batches.updates, few.batches.steps) == (1, 1)
    _, many = planned(ppo_flags(folders["8b"], **SLEEP), cluster, rows=300)
    assert (many.batches.prompts, many.batches.samples, many.batches.steps) == (128, 1024, 3)
    assert sum(phase.seconds for phase in few.time) < sum(phase.seconds for phase in many.time)
    words = (
        f"{FLAG} {folders['tiny']} --data.dataset org/rows --data.output_key a --train.batch_size 64".split()
    )
    _, sft = planned(words, cores(1), SFT, rows=5)
    assert sft.batches.samples == sft.batches.batch_size == 5


def test_lengths_are_assumed_only_if_they_are_unknown(folders: dict[str, str]) -> None:
    flags = ppo_flags(folders["8b"], **SLEEP)
    for given, said in (
        ({}, "prompt 256 (assumed) + response 896 (assumed)"),
        ({"prompt": 20}, "prompt 20 + response 1,014 (assumed)"),
        ({"prompt": 20, "response": 30}, "prompt 20 + response 30"),
    ):
        _, plan = planned(flags, parse_cluster("8xH100-80GB"), **given)
        assert next(line for line in batch_lines(plan) if "tokens of a sample" in line).endswith(said)
    for given, flag in (
        ({"prompt": 9000}, "--prompt_tokens"),
        ({"prompt": 20, "response": 9000}, "--response_tokens"),
    ):
        with refusals.refused(ErrorCode.TOO_LONG, flag=flag, value=9000):
            planned(flags, parse_cluster("8xH100-80GB"), **given)


def test_a_tiny_model_on_cores(folders: dict[str, str]) -> None:
    """24,736 parameters: 2 V H, 2 (4 H^2 + 3 H I + 2 H) and H."""
    words = f"{FLAG} {folders['tiny']} --data.dataset org/rows --data.output_key a".split()
    _, plan = planned(words, cores(1), SFT)
    shown = StringIO()
    show(plan, shown)
    text = shown.getvalue()
    assert "0.025 M" in text
    assert "more GPUs" not in text
    assert re.search(r"of it \w+ \(0\.0*[1-9] GiB\)", text), text


# ---- the command


def test_the_command_prints_tables_and_data(
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {key.removeprefix("--"): value for key, value in _pairs(ppo_flags(folders["8b"], **SLEEP))}
    Path("run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    with pytest.raises(SystemExit) as stop:
        flags.plan(["run.yaml", "--cluster", "8xH100-80GB"])
    text = capsys.readouterr().out
    assert "ppo on 1 x 8 H100 80 GB: " in text and "8.030 B" in text
    assert "step: 128 prompts x 8 samples = 1,024 samples; 1 optimizer step of 1,024 samples" in text
    for word in ("placement", "generate", "KV cache", "optimizer", "bound by", "memory: tightest in"):
        assert word in text
    with pytest.raises(SystemExit) as again:
        flags.plan(["ppo", "run.yaml", "--cluster", "8xH100-80GB", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert stop.value.code == again.value.code == int(not data["fits"])
    assert data["models"]["actor"]["parameters"] == B8 and data["batches"]["samples"] == 1024
    assert "memory of each of 8 devices with " in " ".join(text.split())
    assert "bound by" in text and data["advice"] and data["advice"] in text


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def test_a_file_says_its_command_if_only_one_has_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor: {num_nodes: 1}\nalgo: {options: {a: 1}}\n")
    assert command_and_flags([str(file), "--seed", "1"], "plan") == (
        PPO,
        ["--config", str(file), "--seed", "1"],
    )
    file.write_text("model: {beta: 0.1, ipo_enable: true}\n")
    assert command_and_flags([str(file)], "plan") == command_and_flags(["--config", str(file)], "plan")
    assert command_and_flags([str(file)], "plan")[0] is DPO
    assert command_and_flags(["sft", str(file)], "plan") == (SFT, ["--config", str(file)])
    file.write_text("model: {model_name_or_path: a}\n")
    with refusals.refused(ErrorCode.MISSING_FLAG, value=str(file)):
        command_and_flags([str(file)], "plan")
    with refusals.refused(ErrorCode.MISSING_FLAG):
        command_and_flags(["chat"], "plan")
    with refusals.refused(ErrorCode.NOT_FOUND):
        command_and_flags([str(tmp_path / "none.yaml")], "plan")
