"""Asynchronous GRPO: the engine samples the next batch while the models train on the last one.

    python recipes/grpo_async.py MODEL PROMPTS FOLDER

Samples are one step older than the policy, so the loss is corrected by the ratio of policy and sampler
(`algo.advantage.is_correction_enable`). For a task of your own change what recipes/grpo.py names.
"""

import sys
from itertools import islice

from grpo import FLAGS, reward

import openrlhf as rl

CORRECTED = {**FLAGS, "algo.advantage.is_correction_enable": True}


def main(model: str, prompts: str, folder: str, steps: int = 10) -> None:
    with rl.Run(actor=model, **CORRECTED, **{"ckpt.output_dir": folder}) as run:
        batches = islice(run.prompts(prompts, batch_size=16, epochs=100), steps)
        ahead = run.reward(run.sample(next(batches)), reward)
        while ahead is not None:
            groups, questions = ahead, next(batches, None)
            ahead = None if questions is None else run.reward(run.sample(questions), reward)
            metrics = run.update(run.batch(groups))
            run.sync()  # after the samples that are under way
            run.log(metrics, groups)
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
