"""On-policy DPO: pairs of a better and a worse answer of the policy itself.

    python recipes/dpo_on_policy.py MODEL PROMPTS FOLDER

The reference of a step is the policy that sampled its pairs, so that each step is a small one. For a task of
your own change what recipes/grpo.py names.

    loss = mean(-log sigmoid(beta * (log(pi / pi_ref)(better) - log(pi / pi_ref)(worse))))

Direct Preference Optimization, https://arxiv.org/abs/2305.18290, eq. 7
"""

import sys
from dataclasses import replace
from itertools import islice

import torch
from grpo import FLAGS, reward

import openrlhf as rl

BETA = 0.3


def dpo(log_probs: torch.Tensor, batch: rl.Batch) -> tuple[torch.Tensor, dict]:
    """The sequences of the batch are pairs: better, worse, better, worse, ..."""
    ratios = log_probs - torch.from_numpy(batch.rollout_log_probs)
    sums = torch.stack([ratio.sum() for ratio in ratios.split(batch.num_actions.tolist())])
    margins = BETA * (sums[::2] - sums[1::2])
    return -torch.nn.functional.logsigmoid(margins).mean(), {"dpo/accuracy": (margins > 0).float().mean()}


def pairs_of(groups: list[rl.PromptGroup]) -> list[rl.PromptGroup]:
    """Returns a right and a wrong answer to each prompt that has both."""
    pairs = []
    for group in groups:
        right = [t for t in group.trajectories if t.ok and t.reward]
        wrong = [t for t in group.trajectories if t.ok and not t.reward]
        if right and wrong:
            pairs.append(replace(group, trajectories=[right[0], wrong[0]]))
    return pairs


def main(model: str, prompts: str, folder: str, steps: int = 10) -> None:
    with rl.Run(actor=model, **FLAGS, **{"ckpt.output_dir": folder}) as run:
        for questions in islice(run.prompts(prompts, batch_size=32, epochs=100), steps):
            groups = run.reward(run.sample(questions), reward).result()
            if not (pairs := pairs_of(groups)):
                continue  # nothing to compare
            batch = run.batch(pairs)
            for _ in range(2):
                measured = run.forward_backward(batch, dpo)
                metrics = run.optim_step()
            run.sync()
            run.log(measured.result() | metrics.result(), groups)
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
