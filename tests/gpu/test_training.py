"""Properties of a training step that only a CUDA device shows: host synchronisation, and which memory is
freed after it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import current_device, init_distributed, leave_distributed
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import LossNorm, PackedRow, Sample
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.training.objectives.sft import SFTObjective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES = [
    Sample(token_ids=torch.arange(3, 3 + length), action_mask=torch.arange(length) > 2)
    for length in (20, 70, 50)
]
ROWS = [PackedRow.of([sample]) for sample in SAMPLES]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    init_distributed()
    yield
    leave_distributed()


@pytest.fixture(autouse=True)
def next_model_is_whole() -> Iterator[None]:
    """Lets the next model load whole: an engine at ZeRO stage 3 makes transformers shard every later
    model."""
    yield
    unset_hf_deepspeed_config()
    gc.collect()


def engine_of(folder: Path, lr: float = 1e-3, **ds: object) -> DeepSpeedEngine:
    path = str(tiny_chat_model(folder, seed=0, hidden_size=256))
    return DeepSpeedEngine(
        lambda: PolicyModel(load_causal_lm(path, flag="--model", dtype="bf16", attention="auto")),
        optim=OptimConfig(adam=AdamConfig(lr=lr), lr_scheduler="constant", lr_warmup_ratio=0.0),
        ds=DeepSpeedConfig(**ds),
        total_steps=100,
    )


LAYOUTS = {"one row": [[0, 1, 2]], "two rows": [[2], [0, 1]], "a row for each sequence": [[1], [0], [2]]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_every_layout(tmp_path: Path, stage: int) -> None:
    """Gradients of every layout equal those of the same weights in float32, one sequence after the other, up
    to rounding: each of about 20 bf16 results on the way to a gradient adds an error of at most 2^-8 of its
    size, and most of these errors cancel."""
    path = str(tiny_chat_model(tmp_path, seed=0, hidden_size=256))
    plain = load_causal_lm(path, flag="--model", dtype="bf16", attention="eager").float().to(current_device())
    count = sum(int(sample.action_mask.sum()) for sample in SAMPLES)
    for sample in SAMPLES:
        logits = plain(sample.token_ids[None].to(plain.device)).logits[0, :-1]
        labels = sample.token_ids.where(sample.action_mask, -100)[1:].to(plain.device)
        (F.cross_entropy(logits, labels, reduction="sum") / count).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    engine = engine_of(tmp_path, lr=0.0, zero_stage=stage)
    take_step = engine.engine.step
    for layout, rows in LAYOUTS.items():
        found = {}

        def look(found: dict = found) -> None:
            for name, p in engine.module.model.named_parameters():
                found[name] = safe_get_full_grad(p).float().clone()
            take_step()

        engine.engine.step = look
        engine.train_step([PackedRow.of([SAMPLES[i] for i in row]) for row in rows], SFTObjective())
        for name, gradient in found.items():
            error = float((gradient - wanted[name]).norm() / wanted[name].norm())
            assert error < 20 * 2**-8, (layout, name, error)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_do_not_wait(tmp_path: Path, stage: int) -> None:
    """torch raises if the host waits for the GPU between the first micro-batch and the optimizer's step. At
    stage 3 DeepSpeed itself waits for its reductions after every backward pass."""
    engine = engine_of(tmp_path, zero_stage=stage)
    for _ in range(3):
        engine.train_step(ROWS, SFTObjective())
    take_step = engine.engine.step

    def in_loop(model: DeepSpeedEngine, row: PackedRow, norm: LossNorm) -> tuple:
        torch.cuda.set_sync_debug_mode("error")
        return SFTObjective()(model, row, norm)

    def step() -> None:
        torch.cuda.set_sync_debug_mode("default")
        take_step()

    engine.engine.step = step
    try:
        engine.train_step(ROWS, in_loop)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        del engine.engine.step


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_a_sleeping_optimizer_is_free(tmp_path: Path, stage: int) -> None:
    engine = engine_of(tmp_path, zero_stage=stage)
    losses = [engine.train_step(ROWS, SFTObjective())["sft/loss"] for _ in range(4)]
    before = get_accelerator().memory_allocated()
    engine.offload()
    freed = before - get_accelerator().memory_allocated()
    num_weights = sum(tensor.numel() for _, tensor in engine.weights())
    assert freed >= 3 * 4 * num_weights  # float32 master weights and two moments
    del engine
    engine = engine_of(tmp_path, zero_stage=stage)
    for loss in losses:  # kernels may add in another order; lost optimizer states would show at once
        assert engine.train_step(ROWS, SFTObjective())["sft/loss"] == pytest.approx(loss, rel=1e-2)
        engine.offload()
        engine.reload()
