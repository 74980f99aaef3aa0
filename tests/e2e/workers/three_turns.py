"""Episodes of three turns with a real engine, and the same tokens read by plain transformers, one by one."""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import asyncio
from argparse import Namespace
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.tools.plan.agent import play, prepare
from openrlhf.tools.plan.flags import config_of_agent
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import Batch, Trajectory

TEMPERATURE = 0.7
FEEDBACK = " No.\n Again, number {}: "
AGENT = f"""
from openrlhf.agents.base import AgentInstanceBase, MultiTurnAgentExecutor

class Environment(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        feedback = {FEEDBACK!r}.format(self.turn)
        return {{"rewards": float(self.turn), "environment_feedback": feedback, "done": self.turn == 3}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Environment)
"""
Shares = dict[str, Tensor]


def episodes(spec: dict) -> list[Trajectory]:
    out = Path(spec["out"])
    (out / "agent.py").write_text(AGENT)
    options = Namespace(
        model=spec["model"], file=str(out / "agent.py"), prompt=spec["prompt"], label="", samples=4
    )
    flags = "--ds.param_dtype fp32 --data.max_len 128 --rollout.max_new_tokens 6 --rollout.temperature "
    flags += f"{TEMPERATURE} --rollout.engine {spec['engine']}"
    config = config_of_agent(options, flags.split(), out)
    return asyncio.run(play(config, prepare(config))).trajectories


def one_by_one(model: torch.nn.Module, t: Trajectory) -> list[Tensor]:
    """Computes the log-prob of each action by a pass over only the tokens before it."""
    found = []
    for i in t.action_mask.nonzero()[0]:
        before = torch.from_numpy(t.token_ids[:i].astype("int64"))[None]
        logits = model(input_ids=before, use_cache=False).logits[0, -1].float()
        found.append((logits / TEMPERATURE).log_softmax(-1)[int(t.token_ids[i])])
    return found


def gradients(model: torch.nn.Module) -> Shares:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_the_row(path: str, trajectories: list[Trajectory], advantages: Tensor) -> Shares:
    """Computes log-probs and gradients as a training step does: all sequences in one packed row."""
    policy = PolicyModel(load_causal_lm(path, flag="--model", dtype="fp32", attention="auto"))
    credit = {"advantages": advantages.numpy(), "returns": advantages.numpy()}
    row = ExperienceRow.of(replace(Batch.of(trajectories), **credit))
    norm = LossNorm(num_tokens=len(advantages), num_sequences=len(trajectories))
    PolicyObjective(temperature=TEMPERATURE)(policy, row, norm)[0].backward()
    return gradients(policy.model)


def main(spec: dict) -> dict:
    trajectories = episodes(spec)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    log_probs = [one_by_one(model, t) for t in trajectories]
    number = sum(map(len, log_probs))
    advantages = torch.linspace(-1, 1, number)
    (-(advantages * torch.stack([*chain(*log_probs)])).sum() / number).backward()
    plain, packed = gradients(model), of_the_row(spec["model"], trajectories, advantages)
    return {
        "masks": [t.action_mask.tolist() for t in trajectories],
        "token_ids": [t.token_ids.tolist() for t in trajectories],
        "read": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in read(spec["prompt"])],
        "sampled": [t.rollout_log_probs.tolist() for t in trajectories],
        "computed": [torch.stack(found).tolist() for found in log_probs],
        "rewards": [[t.reward, *t.turn_rewards.tolist()] for t in trajectories],
        "gradients": {n: [float((g - packed[n]).norm()), float(g.norm())] for n, g in plain.items()},
        "same_parameters": plain.keys() == packed.keys(),
    }


def read(prompt: str) -> list[str]:
    """Returns the texts that the policy reads before each of its answers."""
    return [prompt, FEEDBACK.format(1), FEEDBACK.format(2)]
