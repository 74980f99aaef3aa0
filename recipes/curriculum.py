"""A curriculum with a state: prompts that the policy always or never solves are asked less often.

    python recipes/curriculum.py MODEL PROMPTS FOLDER

The share of solved answers of each prompt is the loop's own state. Checkpoints hold it, and the same command
continues from the last one. For a task of your own change what recipes/grpo.py names.
"""

import random
import sys
from dataclasses import replace

from grpo import FLAGS, reward

import openrlhf as rl


def interest(solved: float) -> float:
    """Returns a weight: 1 where half of the answers are right, little where all or none are."""
    return 0.05 + 4 * solved * (1 - solved)


def choose(pool: list[rl.Prompt], solved: dict[str, float], count: int, seed: int) -> list[rl.Prompt]:
    """Returns different prompts, drawn by their interest; a prompt that was never asked is interesting."""
    rng = random.Random(seed)
    ranked = [(rng.random() ** (1 / interest(solved.get(str(p.prompt_id), 0.5))), p) for p in pool]
    return [p for _, p in sorted(ranked, key=lambda pair: -pair[0])[:count]]


def main(model: str, prompts: str, folder: str, steps: int = 10) -> None:
    with rl.Run(actor=model, **FLAGS, **{"ckpt.output_dir": folder, "ckpt.save_steps": 5}) as run:
        pool = next(run.prompts(prompts))
        run.load_state()
        solved: dict[str, float] = run.state  # saved with each checkpoint
        while run.step < steps:
            questions = [replace(p, epoch=run.step) for p in choose(pool, solved, 16, run.step)]
            groups = run.reward(run.sample(questions), reward).result()
            for group in groups:
                rewards = [t.reward or 0.0 for t in group.trajectories if t.ok]
                solved[str(group.prompt.prompt_id)] = sum(rewards) / max(1, len(rewards))
            metrics = run.update(run.batch(groups))
            run.sync()
            run.log(metrics.result() | {"curriculum/asked": len(solved)}, groups)
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
