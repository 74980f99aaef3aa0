"""Runs of `openrlhf ppo` on a GPU; its rollout and step compared with vLLM, a PyTorch loop and TRL alone."""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from gpukit.models import SHAPES, VOCABULARY, config_of, language_model
from gpukit.stage import Figures, Setting
from gpukit.training import rates_of
from openrlhf.models.attention import PACKED
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import prepare

MISMATCH = 0.02
"""Limit in nats: sampler and trainer compute the same weights in bf16, whose unit roundoff is 2^-8 =
0.004."""


def run(
    setting: Setting,
    flags: str,
    prompts: int = 16,
    tokens: int = 64,
    steps: int = 2,
    moe: bool = False,
    reaches: dict[str, float] | None = None,
) -> Figures:
    """Trains from random weights. Sampler and trainer must agree in every step, which shows that weights
    arrive.

    reaches: metrics that must be at least so large in some step, which shows that a feature was used.
    Figures: the phases of the last step, the rate at which the phase `sync` delivers the weights, and the
    most memory of a GPU beyond what was in use before.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = random_policy(folder, setting, moe=moe)
        with memory_watch(folder / "memory", setting) as memory:
            train_policy(folder, task, setting, f"{flags} {sizes(setting, prompts, tokens, steps)}")
        rows = metrics_of(folder / "run")
        num_bytes = sum(path.stat().st_size for path in task.model.glob("*.safetensors"))
    assert len(rows) == steps, f"the run made {len(rows)} of {steps} steps"
    for metric, least in (reaches or {}).items():
        most = max(row.get(metric, float("-inf")) for row in rows)
        assert most >= least, f"{metric} is at most {most:.3g}, not {least:.3g}: the feature was not used"
    worst = max(row["mismatch/abs_diff_mean"] for row in rows)
    assert worst < MISMATCH, f"sampler and trainer differ by {worst:.3g} nats a token"
    phases = {k.removeprefix("timing/"): v for k, v in rows[-1].items() if k.startswith("timing/")}
    sampled = rows[-1]["rollout/response_length_mean"] * rows[-1]["rollout/num_samples"]
    rates = {"sampled tokens/s": sampled / phases["generate"]} if phases.get("generate") else {}
    if phases.get("sync"):
        rates["GB/s of the phase sync"] = num_bytes / phases["sync"] / 1e9
    return {"nats apart": worst, **rates, **phases, **memory}


def sizes(setting: Setting, prompts: int, tokens: int, steps: int) -> str:
    prompts, tokens = setting.size((prompts, tokens), (2, 8))
    return (
        f"--rollout.batch_size {prompts} --train.batch_size {8 * prompts} --rollout.max_new_tokens {tokens} "
        f"--data.max_len {tokens + 128} --train.max_steps {steps} --train.num_episodes {steps}"
    )


def random_policy(folder: Path, setting: Setting, *, moe: bool = False) -> Any:
    """Writes the demo's task, and a model of 0.6B shape whose vocabulary is as large as a real one's."""
    task = prepare(folder / "task", num_pretrain=8, num_sft=8, num_prompts=1024, num_eval=8)
    fill_vocabulary(task.model / "tokenizer.json", setting.size(VOCABULARY, 512))
    shape = setting.size("0.6B", "tiny")
    model = mixture(shape, setting) if moe else language_model(config_of(shape, setting), setting)
    saved = json.loads((task.model / "config.json").read_text())
    for name in ("eos_token_id", "pad_token_id"):
        setattr(model.config, name, saved[name])
        setattr(model.generation_config, name, saved[name])
    model.save_pretrained(task.model)
    return task


def mixture(shape: str, setting: Setting) -> Any:
    """Writes a model with eight experts, two of which read each token."""
    config = Qwen3MoeConfig(
        vocab_size=setting.size(VOCABULARY, 512),
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=SHAPES[shape]["intermediate_size"] // 4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="bfloat16",
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_attn_implementation(PACKED)
    return model


def fill_vocabulary(path: Path, size: int) -> None:
    """Adds tokens that no text has, up to `size`."""
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
    assert done.returncode == 0, f"exit code {done.returncode}: openrlhf ppo {command}"


def metrics_of(run: Path) -> list[dict[str, float]]:
    rows = read_metrics(run / "metrics.jsonl")
    return [rows[step] for step in sorted(rows)]


@contextmanager
def memory_watch(path: Path, setting: Setting) -> Iterator[Figures]:
    """Yields figures that are filled at the end: the most GiB in use on the fullest GPU, by all processes,
    beyond what was in use at the beginning."""
    most: Figures = {}
    if setting.rehearsal:
        yield most
        return
    torch.cuda.empty_cache()  # frees the memory of building the model in this process
    query = "--query-gpu=memory.used --format=csv,noheader,nounits -lms 100"
    with path.open("w") as file:
        watch = subprocess.Popen(["nvidia-smi", *query.split()], stdout=file)
        time.sleep(0.5)  # time for its first line
        try:
            yield most
        finally:
            watch.terminate()
            try:
                watch.wait(10)
            except subprocess.TimeoutExpired:
                watch.kill()
    used = [float(line) / 1024 for line in path.read_text().splitlines() if line.strip().isdecimal()]
    if used:
        most["peak GiB"] = max(used) - used[0]


def rollout(setting: Setting, invariant: bool = False) -> Figures:
    """Runs benchmarks/rollout.py: the package compared with bare vLLM, with the package's engine arguments
    and with vLLM's own.

    invariant: with vLLM's batch-invariant kernels, by which both sample the same tokens.
    """
    if invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    flags = setting.size(
        "--prompts 64 --samples 8 --dtype bf16 --repeats 3 --ways ours bare defaults",
        "--prompts 2 --samples 2 --max_new_tokens 8 --repeats 1",
    )
    with tempfile.TemporaryDirectory() as folder:
        task = random_policy(Path(folder), setting)
        torch.cuda.empty_cache()
        return rates_of("rollout.py", f"--model {task.model} {flags}")


def floor(setting: Setting) -> Figures:
    """Runs benchmarks/rl_step.py: a step compared with TRL's, and with vLLM and a PyTorch loop alone."""
    flags = setting.size(
        "--model small --steps 4 --warmup 1 --rounds 2 --threads 0 --modes ours floor trl",
        "--model small --steps 2 --warmup 1 --rounds 1 --prompts 2 --samples 2 --max_new_tokens 8 "
        "--threads 1 --modes ours floor",
    )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        script = Path(__file__).resolve().parents[1] / "rl_step.py"
        done = subprocess.run([sys.executable, str(script), *flags.split(), "--json", str(result)])
        assert done.returncode == 0, f"rl_step.py ended with exit code {done.returncode}"
        return json.loads(result.read_text())
