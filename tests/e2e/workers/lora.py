"""Model with adapters at several ZeRO stages; reports gradients, the export and what a resumed run does."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from workers.gradients import fill_adapters

from openrlhf.backends.build import build_engine as build_engine_of
from openrlhf.backends.distributed import ProcessMesh, seed_everything
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.errors import UsageError
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import disabled_adapters, prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.tools.verify.layouts import step_with_gradients
from openrlhf.training.objectives.sft import SFTObjective


def build_engine(spec: dict, case: dict) -> TrainedRank:
    ds = DeepSpeedConfig(
        zero_stage=case["stage"],
        param_dtype=case.get("dtype", "fp32"),
        load_in_4bit=case.get("in_4bit", False),
        lora=LoraConfig(rank=4, alpha=8, target_modules=tuple(case.get("targets", ["all-linear"]))),
    )

    def build() -> PolicyModel:
        model = load_causal_lm(
            spec["model"], flag="--model", dtype=ds.param_dtype, attention="auto", in_4bit=ds.load_in_4bit
        )
        prepare_for_training(model, ds)
        fill_adapters(model)
        return PolicyModel(model)

    seed_everything(7, deterministic=False)
    return build_engine_of(
        build,
        backend=case.get("backend", "deepspeed"),
        mesh=ProcessMesh.joined(),
        optim=OptimConfig(adam=AdamConfig(lr=1e-2, eps=1e-3), lr_warmup_ratio=0.0, max_norm=0.0),
        ds=ds,
        total_steps=100,
        gradient_checkpointing=case.get("checkpointing", False),
        reentrant=case.get("reentrant", False),
    )


def below(policy: PolicyModel, row: PackedRow) -> torch.Tensor:
    with torch.no_grad(), disabled_adapters(policy.model):
        return policy(row).log_probs


@dataclass(frozen=True)
class Compared:
    """SFT objective that also measures how far the policy is from the model below its adapters."""

    policy: PolicyModel

    def __call__(self, model, batch, norm):
        reference = below(self.policy, batch)
        loss, metrics = SFTObjective()(model, batch, norm)
        again = below(self.policy, batch)
        return loss, metrics | {"reference": again.sum(), "drift": (reference - again).abs().sum()}


def log_probs(engine: TrainedRank, rows: list[PackedRow]) -> torch.Tensor:
    return torch.cat(engine.forward(rows, lambda model, row: model(row).log_probs))


def on_rank(spec: dict) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = [Sample(token_ids=ids, action_mask=mask) for ids, mask in torch.load(spec["samples"])]
    everything = [PackedRow.of(samples)]
    rows = [PackedRow.of([sample]) for sample in samples[rank::world]]
    report = {}
    for number, case in enumerate(spec["cases"]):
        folder = Path(spec["out"], str(number))
        found: dict[str, torch.Tensor] = {}
        engine = build_engine(spec, case)
        with torch.no_grad(), disabled_adapters(engine.module.model):
            found["base log-probs"] = log_probs(engine, everything)

        gradients, step = step_with_gradients(engine, rows, Compared(engine.module))
        found |= {f"gradient {name}": gradient for name, gradient in gradients.items()}
        losses = [step["sft/loss"]]
        found["log-probs"] = log_probs(engine, everything)
        engine.export(str(folder / "adapter"))
        engine.save_checkpoint(str(folder / "ckpt"), "one", {"step": 1})
        losses.append(engine.train_step(rows, SFTObjective())["sft/loss"])
        resumed = build_engine(spec, case)
        assert resumed.load_checkpoint(str(folder / "ckpt"), "one") == {"step": 1}
        again = resumed.train_step(rows, SFTObjective())["sft/loss"]
        if "targets_of_another" in case:
            other = build_engine(spec, case | {"targets": case["targets_of_another"]})
            try:
                other.load_checkpoint(str(folder / "ckpt"), "one")
            except UsageError as error:
                step["refused"] = error.code
        if rank == 0:
            torch.save(found, folder / "found.pt")
        report[number] = {"losses": losses, "again": again, "folder": str(folder), "step": step}
    return report
