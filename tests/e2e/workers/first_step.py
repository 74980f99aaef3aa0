"""First optimizer step of a model whose configuration asks for much dropout."""

import numpy as np
import torch

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine, DeepSpeedFrozen
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.loop.supervised.reference import without_adapters
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import ExperienceRow, PackedRow, Pair, PairRow, Sample
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import Batch, Metrics


def samples(count: int) -> list[Sample]:
    random = torch.Generator().manual_seed(3)
    mask = torch.arange(12) >= 4
    ids = torch.randint(3, 61, (count, 12), generator=random)
    return [Sample(token_ids=row, action_mask=mask) for row in ids]


def first_steps(spec: dict, case: dict) -> dict[str, Metrics]:
    """Returns the metrics of a step of DPO, with a learning rate of 0, and of one of PPO."""
    torch.manual_seed(0)  # the dropout of a case is the same in every run
    ds = DeepSpeedConfig(
        zero_stage=case["stage"], param_dtype="fp32", lora=LoraConfig(rank=case["rank"], dropout=0.5)
    )

    def load() -> PolicyModel:
        return PolicyModel(load_causal_lm(spec["model"], flag="--model", dtype="fp32", attention="auto"))

    def build() -> PolicyModel:
        policy = load()
        prepare_for_training(policy.model, ds)
        return policy

    engine = DeepSpeedEngine(
        build,
        optim=OptimConfig(adam=AdamConfig(lr=0.0)),
        ds=ds,
        total_steps=10,
        gradient_checkpointing=case["checkpointing"],
        dropout=case["dropout"],
    )
    if case["rank"]:
        reference = without_adapters(engine.module)
    else:
        frozen = DeepSpeedFrozen(load, ds=ds, offload=False)
        reference = lambda row: frozen(row).log_probs
    made = samples(8)
    pairs = PairRow.of([Pair(chosen=a, rejected=b) for a, b in zip(made[::2], made[1::2], strict=True)])
    dpo = engine.train_step([pairs], DPOObjective(beta=0.5, reference=reference))
    old = engine.forward([PackedRow.of(made)], lambda model, row: model(row).log_probs)[0]
    ones = np.ones(len(old), np.float32)
    batch = Batch(
        token_ids=np.concatenate([s.token_ids for s in made]),
        action_mask=np.concatenate([s.action_mask for s in made]),
        lengths=np.array([s.length for s in made]),
        num_actions=np.array([s.num_actions for s in made]),
        rollout_log_probs=old.numpy(),
        log_probs=old.numpy(),
        advantages=ones,
        returns=0 * ones,
    )
    return {"dpo": dpo, "ppo": engine.train_step([ExperienceRow.of(batch)], PolicyObjective())}


def on_rank(spec: dict) -> dict:
    return {name: first_steps(spec, case) for name, case in spec["cases"].items()}
