"""Memory of a step with one long row, as it was predicted and as it was."""

import ctypes
from pathlib import Path

import torch
import torch.distributed as dist

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.backends.peak_memory import peak, restart
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

M_MMAP_THRESHOLD = -3


def row_of(lengths: list[int]) -> PackedRow:
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 300, (length,), generator=random) for length in lengths]
    return PackedRow.of([Sample(token_ids=x, action_mask=torch.arange(len(x)) > 0) for x in ids])


def on_rank(spec: dict) -> dict:
    # Freed memory goes back to the system at once, so that resident memory is what the passes need.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
    ds = DeepSpeedConfig(param_dtype="fp32", ring_attn_size=dist.get_world_size(), **spec["ds"])
    engine = DeepSpeedEngine(
        lambda: PolicyModel(load_causal_lm(spec["model"], flag="--model", dtype="fp32", attention="auto")),
        optim=OptimConfig(),
        ds=ds,
        total_steps=100,
        gradient_checkpointing=spec["checkpointing"],
        mesh=ProcessMesh.joined(sequence=ds.ring_attn_size),
    )
    engine.train_step([row_of([64])], SFTObjective())  # memory of libraries, and the optimizer's states
    before = resident()
    row = row_of(spec["lengths"])
    said = engine.row_memory(len(row.token_ids))
    restart()
    metrics = engine.train_step([row], SFTObjective())
    return {"said": said.activations, "needed": peak() - before, "loss": metrics["sft/loss"]}


def resident() -> int:
    """Returns the resident memory of this process, bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
