"""Best-of-n distillation: the policy imitates the best of its own answers (rejection sampling).

    python recipes/best_of_n.py MODEL PROMPTS FOLDER

For a task of your own change what recipes/grpo.py names.
"""

import sys
from dataclasses import replace
from itertools import islice

import torch
from grpo import FLAGS, reward

import openrlhf as rl


def likelihood(log_probs: torch.Tensor, batch: rl.Batch) -> tuple[torch.Tensor, dict]:
    return -log_probs.mean(), {}


def main(model: str, prompts: str, folder: str, steps: int = 10) -> None:
    with rl.Run(actor=model, **FLAGS, **{"ckpt.output_dir": folder}) as run:
        for questions in islice(run.prompts(prompts, batch_size=32, epochs=100), steps):
            groups = run.reward(run.sample(questions), reward).result()
            best = [max(group.trajectories, key=lambda t: t.reward or 0.0) for group in groups]
            solved = [replace(g, trajectories=[t]) for g, t in zip(groups, best, strict=True) if t.reward]
            if not solved:
                continue  # nothing to imitate
            run.forward_backward(run.batch(solved), likelihood)
            metrics = run.optim_step()
            run.sync()
            run.log(metrics, groups)
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
