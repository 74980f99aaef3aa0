"""Gradients of the SFT, actor and critic objectives for several layouts of the same samples, at one ZeRO
stage."""

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh, seed_everything
from openrlhf.config.sections import DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ValueModel, load_scorer
from openrlhf.rows import ExperienceRow, PackedRow
from openrlhf.tools.verify.layouts import step_with_gradients
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.ptx import PTXObjective
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.types import LIKELY, Batch

LENGTHS = (5, 9, 17, 30, 8, 12, 3, 22, 11, 2)
BEGINNINGS = {7: (3, 15), 2: (3, 10), 8: (7, 11), 5: (2, 9)}
"""Samples that begin like others: (other, number of tokens). Rows that hold both read these tokens once."""


def policy(spec: dict) -> PolicyModel:
    ds = options_of(spec)
    model = load_causal_lm(
        spec["model"],
        flag="--model",
        dtype=spec.get("dtype", "fp32"),
        attention=spec["attention"],
        in_4bit=ds.load_in_4bit,
    )
    fill_adapters(prepare_for_training(model, ds))
    return PolicyModel(model)


def options_of(spec: dict) -> DeepSpeedConfig:
    return DeepSpeedConfig(
        zero_stage=spec["stage"],
        param_dtype="fp32",
        sequence_parallel_mode=spec.get("mode", "auto"),
        share_prefixes=spec.get("share_prefixes", "auto"),
        load_in_4bit=spec.get("in_4bit", False),
        activation_offload=spec.get("on_host", False),
        lora=LoraConfig(rank=spec.get("lora_rank", 0), alpha=8),
    )


def fill_adapters(model: PreTrainedModel) -> None:
    """Fills the second factors of adapters, which begin as zeros and would hide the gradients of the
    first."""
    random = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.copy_(0.1 * torch.randn(param.shape, generator=random))


def critic(spec: dict) -> ValueModel:
    """Builds a critic with a new head, which must be the same everywhere."""
    seed_everything(0, deterministic=False)
    return ValueModel(
        load_scorer(spec["model"], flag="--model", dtype="fp32", attention=spec["attention"]).model
    )


PPO = PolicyObjective(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, correction="tis", temperature=0.7)
OBJECTIVES: dict[str, tuple] = {
    "sft": (policy, (SFTObjective(), PackedRow.from_batch)),
    "ppo": (policy, (PPO, ExperienceRow.of)),
    "ppo-ptx": (policy, (PPO, ExperienceRow.of), (PTXObjective(coef=0.5), PackedRow.from_batch)),
    "gspo": (policy, (PolicyObjective(loss_type="gspo"), ExperienceRow.of)),
    "cispo": (
        policy,
        (
            PolicyObjective(loss_type="cispo", aggregation="constant_length", longest_response=20),
            ExperienceRow.of,
        ),
    ),
    "centered": (policy, (PolicyObjective(centers_scores=True, correction="tis"), ExperienceRow.of)),
    "critic": (critic, (CriticObjective(value_clip=0.2), ExperienceRow.of)),
}
"""Model, objective and rows of each case."""
LAYOUTS = {
    # (order of the samples, samples in a row)
    "one by one": (range(10), 1),
    "backwards, three in a row": (range(9, -1, -1), 3),
    "shuffled, all in a row": ((3, 1, 4, 0, 5, 9, 2, 6, 8, 7), 10),
}


def experiences() -> Batch:
    random = torch.Generator().manual_seed(1)
    made: dict[str, list[torch.Tensor]] = defaultdict(list)
    for length in LENGTHS:
        mask = torch.rand(length, generator=random) < 0.6
        mask[0], mask[1] = False, True
        n = int(mask.sum())
        noise = lambda n=n: 0.1 * torch.randn(n, generator=random)
        log_probs = -4 + noise()
        columns = {
            "action_mask": mask,
            "token_ids": torch.randint(3, 300, (length,), generator=random),
            "rollout_log_probs": log_probs + noise(),
            "log_probs": log_probs,
            "ref_log_probs": log_probs + noise(),
            "values": noise(),
            "advantages": torch.randn(n, generator=random),
            "returns": noise(),
        }
        for name, column in columns.items():
            made[name].append(column)
    for sample, (other, length) in BEGINNINGS.items():
        made["token_ids"][sample][:length] = made["token_ids"][other][:length]
    num_actions = np.array([int(mask.sum()) for mask in made["action_mask"]])
    joined = {name: torch.cat(columns).numpy() for name, columns in made.items()}
    likely = likely_tokens(int(num_actions.sum()), random)
    return Batch(lengths=np.array(LENGTHS), num_actions=num_actions, likely=likely, **joined)


def likely_tokens(num_actions: int, random: torch.Generator) -> np.ndarray:
    """Returns four likely tokens of each action, with about half of the probability, as recorded."""
    tokens = np.empty((num_actions, 4), LIKELY)
    tokens["id"] = torch.randint(3, 300, tokens.shape, generator=random)
    tokens["log_prob"] = -2 - torch.rand(tokens.shape, generator=random)
    return tokens


def gradients(spec: dict, mesh: ProcessMesh, build, parts, order, size: int) -> dict[str, torch.Tensor]:
    engine = build_engine(
        lambda: build(spec),
        backend=spec.get("backend", "deepspeed"),
        optim=OptimConfig(max_norm=0.0),
        ds=options_of(spec),
        total_steps=1,
        mesh=mesh,
        gradient_checkpointing=spec.get("checkpointing", False),
        reentrant=spec.get("reentrant", False),
    )
    batch = experiences()
    # Ranks get different numbers of samples, and therefore rows of different numbers of sequences.
    mine = list(order) if mesh.data == 1 else (list(order[:6]), list(order[6:]))[mesh.data_rank]
    groups = [batch.select(mine[k : k + size]) for k in range(0, len(mine), size)]
    (rows, objective), *also = [([make(group) for group in groups], minimised) for minimised, make in parts]
    return step_with_gradients(engine, rows, objective, *also)[0]


def chosen(layouts: Collection[str], place: int, which: str) -> list[str]:
    """Returns all layouts, or with "some" the one of this place; the next place has another."""
    return list(layouts) if which == "all" else [list(layouts)[place % len(layouts)]]


def on_rank(spec: dict) -> dict:
    mesh = ProcessMesh.joined(sequence=spec.get("sequence", 1), tensor=spec.get("tensor", 1))
    report = {}
    wanted = {kind: OBJECTIVES[kind] for kind in spec.get("objectives", OBJECTIVES)}
    for place, (kind, (build, *parts)) in enumerate(wanted.items()):
        for layout in chosen(LAYOUTS, place, spec.get("layouts", "all")):
            found = gradients(spec, mesh, build, parts, *LAYOUTS[layout])
            path = f"{spec['out']}/{kind} {layout}.pt"
            if dist.get_rank() == 0:
                torch.save(found, path)
            report[f"{kind} {layout}"] = path
    return report
