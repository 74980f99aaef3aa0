"""Supervised and policy training compared with a bare PyTorch loop: the first loss, tokens per second,
memory."""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpukit.machine import data_sheet_rate, matrix_rate, seconds
from gpukit.models import ROW_TOKENS, SHAPES, config_of, language_model, packed_rows, training_flops
from gpukit.processes import ROOT
from gpukit.stage import Figures, Setting
from openrlhf.algorithms.logprobs import sum_of_log_probs
from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import init_distributed, leave_distributed
from openrlhf.config.sections import DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.memory.sizes import ModelShape
from openrlhf.memory.training import training_memory
from openrlhf.models.attention import PACKED, packing_kwargs
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.liger import apply_liger
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import ExperienceRow, PackedRow
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.sft import SFTObjective

FREE = 0.9
"""Fraction of a GPU's memory that a model may be planned to fill: an allocator fragments."""
LOSSES_AGREE = 0.05
"""Largest difference of losses, nats. bf16 rounds by up to 2^-8 = 0.4 %; the mean of losses of about 12 nats
differs by less than that."""

Step = Callable[[list[Any]], float]
"""Optimizer step; returns the loss before it."""


def sft(
    setting: Setting, shape: str, checkpointing: bool, ways: tuple[str, ...] = ("ours", "bare")
) -> Figures:
    """Measures tokens per second of packed SFT, and the share of a rate that its arithmetic takes (MFU), in
    several ways."""
    layers = layers_that_fit(setting.size(shape, "tiny"), setting, checkpointing)
    found = {way: in_new_process(train, way, layers, setting, checkpointing) for way in ways}
    losses = [figures["loss"] for figures in found.values()]
    assert max(losses) - min(losses) < LOSSES_AGREE, (
        f"the first losses differ: {dict(zip(ways, losses, strict=True))}"
    )
    figures: Figures = {"layers": layers[1]}
    figures |= {f"{way} {name}": value for way, figures in found.items() for name, value in figures.items()}
    return figures | {
        f"ours / {way}": found["ours"]["tokens/s"] / found[way]["tokens/s"] for way in ways if way != "ours"
    }


def layers_that_fit(shape: str, setting: Setting, checkpointing: bool) -> tuple[str, int]:
    """Returns the shape and the number of its layers that this GPU has memory for, by `training_memory`."""
    for layers in range(SHAPES[shape]["num_hidden_layers"], 0, -1):
        if setting.rehearsal:
            break
        config = config_of(shape, setting, num_hidden_layers=layers)
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(config).num_parameters()
        model = ModelShape.of(config, weight_bytes=2 * count, trainable=count, normed_heads=True)
        gpu = torch.cuda.get_device_properties(0).total_memory
        needed = training_memory(model, zero_two(), "deepspeed", ROW_TOKENS, checkpointing, gpu=gpu)
        if needed.total < FREE * gpu:
            break
    return shape, layers


def zero_two(**changes: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig(zero_stage=2, param_dtype="bf16", **changes)


def train(way: str, layers: tuple[str, int], setting: Setting, checkpointing: bool) -> dict[str, float]:
    """Measures a few steps of one way."""
    shape, count = layers
    config = config_of(shape, setting, num_hidden_layers=count)
    with distributed():
        step = TRAINERS[way](config, setting, checkpointing)
        rows = packed_rows(setting, 2, prompt=0.5 if way.startswith("rl") else 0.0)
        return measured(step, rows, config, setting, frozen=way == "rl-lora")


def measured(
    step: Step, rows: list[PackedRow], config: Any, setting: Setting, *, frozen: bool
) -> dict[str, float]:
    loss = step(rows)
    took = statistics.median(seconds(lambda: step(rows), setting) for _ in range(4))
    rate = sum(training_flops(config, row, frozen=frozen) for row in rows) / took
    figures = {"tokens/s": sum(len(row.token_ids) for row in rows) / took, "loss": loss}
    figures["MFU, % of a product"] = 100 * rate / matrix_rate(setting)
    if not setting.rehearsal:
        if math.isfinite(sheet := data_sheet_rate()):
            figures["MFU, % of the data sheet"] = 100 * rate / sheet
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    print(figures, flush=True)  # the log then has them even if another way fails
    return figures


def ours(
    config: Any,
    setting: Setting,
    checkpointing: bool,
    *,
    liger: bool = False,
    lora: int = 0,
    rl: bool = False,
) -> Step:
    ds = zero_two(lora=LoraConfig(rank=lora))

    def build() -> PolicyModel:
        model = language_model(config, setting)
        if liger:
            apply_liger(model)
            get_row_layout(model).liger = True
        return PolicyModel(prepare_for_training(model, ds) if lora else model)

    engine = DeepSpeedEngine(
        build, optim=OptimConfig(), ds=ds, total_steps=10, gradient_checkpointing=checkpointing
    )
    assert get_row_layout(engine.module.model).packed, "rows were read one sequence at a time"
    if not rl:
        return lambda rows: engine.train_step(rows, SFTObjective())["sft/loss"]
    return lambda rows: engine.train_step([experience(row) for row in rows], PolicyObjective())["policy/loss"]


def experience(row: PackedRow) -> ExperienceRow:
    """Returns the row with advantages of both signs, as the first update of a step sees it."""
    zeros = torch.zeros(len(row.actions))
    return ExperienceRow(
        row=row,
        old_log_probs=None,
        advantages=torch.linspace(-1, 1, len(row.actions)),
        returns=zeros,
        rollout_log_probs=zeros,
    )


def bare(config: Any, setting: Setting, checkpointing: bool) -> Step:
    """Builds a step of AdamW on float32 copies of the bf16 weights, as ZeRO keeps them. The head is the
    package's function, so that both ways compute the same products."""
    model = language_model(config, setting).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = list(model.parameters())
    copies = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(copies, lr=1e-6, weight_decay=0.0, fused=True)

    def step(rows: list[PackedRow]) -> float:
        count = sum(int(row.action_mask.sum()) for row in rows)
        losses = []
        for row in rows:
            loss = -bare_log_probs(model, row.to(torch.device(setting.device))) / count
            loss.backward()
            losses.append(loss.detach())
        for copy, weight in zip(copies, weights, strict=True):
            copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([weight.data for weight in weights], copies)
        return float(sum(losses))

    return step


def bare_log_probs(model: Any, row: PackedRow) -> torch.Tensor:
    """Returns the sum of the log-probs of the row's actions."""
    packing = packing_kwargs(PACKED, row.lengths, row.token_ids.device)
    inputs = {"input_ids": row.token_ids[None], "position_ids": row.position_ids[None], "use_cache": False}
    hidden = model.model(**inputs, **packing).last_hidden_state[0]
    return sum_of_log_probs(hidden[row.actions - 1], model.lm_head.weight, row.token_ids[row.actions])


TRAINERS: dict[str, Callable[[Any, Setting, bool], Step]] = {
    "ours": ours,
    "liger": partial(ours, liger=True),
    "rl": partial(ours, rl=True),
    "rl-lora": partial(ours, rl=True, lora=16),
    "bare": bare,
}


def policy(setting: Setting, shape: str, lora: bool = False) -> Figures:
    """Measures an optimizer step of RL on rows whose second halves are answers, with checkpointing. prime-rl
    publishes for one H100 and rows of 16k 11.9k tokens/s and 11.1 % of the data sheet (0.6B), 6.23k and 21.7
    % (4B with LoRA); in SFT of 0.6B 25.5k and 23.7 %."""
    way = "rl-lora" if lora else "rl"
    name = setting.size(shape, "tiny")
    # Adapters: the optimizer's states are small, so all layers fit.
    layers = (name, SHAPES[name]["num_hidden_layers"]) if lora else layers_that_fit(name, setting, True)
    return {"layers": layers[1], **in_new_process(train, way, layers, setting, True)}


def waits(setting: Setting) -> Figures:
    """Counts how often the CPU waits for the GPU in an optimizer step: as often with ten passes as with
    two."""
    few, many = (in_new_process(count_waits, passes, setting) for passes in (2, 10))
    assert many == few, f"the CPU waits {few} times in a step of 2 passes, {many} times in one of 10"
    return {"waits of a step": few}


def count_waits(passes: int, setting: Setting) -> int:
    with distributed():
        step = ours(config_of("tiny", setting), setting, False)
        rows = packed_rows(setting, passes)
        step(rows)
        if not setting.rehearsal:
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(rows)
    return sum("synchroniz" in str(warning.message) for warning in seen)


def trl(setting: Setting) -> Figures:
    """Runs benchmarks/supervised.py: TRL's SFT as it comes and padding-free, compared with the package and
    the bare loop."""
    sizes = setting.size(
        "--model small --vocab 151936 --rows 256 --batch_size 16 --rounds 3",
        "--model tiny --rows 4 --batch_size 2 --rounds 1",
    )
    ways = setting.size("ours bare trl trl-padding-free", "ours bare")
    return rates_of("supervised.py", f"{sizes} --tasks sft --modes {ways}")


def prefixes(setting: Setting) -> Figures:
    """Runs benchmarks/prefixes.py: common prefixes read once, compared with rows read whole."""
    sizes = setting.size(
        "--hidden 1024 --layers 8 --vocab 32000 --rounds 5", "--hidden 64 --layers 1 --rounds 1"
    )
    shapes = setting.size(["update", "pairs 1", "pairs 5"], ["demo"])
    command = [sys.executable, str(ROOT / "benchmarks" / "prefixes.py"), *sizes.split(), "--shapes", *shapes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0, f"prefixes.py ended with exit code {done.returncode}"
    cells = [line.split(" | ") for line in done.stdout.splitlines()]
    of_shapes = {line[0].removeprefix("| "): line for line in cells}
    return {f"{shape}, whole / ours": float(of_shapes[shape][3].split()[0]) for shape in shapes}


def rates_of(script: str, flags: str) -> Figures:
    """Runs another benchmark and reads the first figure of each of its ways."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0, f"{script} ended with exit code {done.returncode}"
    rows = re.findall(r"^([a-z][a-z-]*) +([\d,.]+)\b", done.stdout, re.MULTILINE)
    return {f"{way} tokens/s": float(figure.replace(",", "")) for way, figure in rows}


@contextmanager
def distributed() -> Iterator[None]:
    init_distributed()
    yield
    leave_distributed()


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process, whose memory is free when this returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
