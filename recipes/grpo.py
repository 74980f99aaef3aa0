"""GRPO: groups of answers, rewards of a function, advantages within each group, one policy gradient step.

    python recipes/grpo.py MODEL PROMPTS FOLDER

For a task of your own change `reward`, and in FLAGS the names of your columns (`data.*`), the length of
answers and the learning rate. Every flag of `openrlhf ppo` may stand in FLAGS.
"""

import sys
from itertools import islice

import openrlhf as rl

FLAGS = {
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "rollout.n_samples_per_prompt": 8,
    "rollout.max_new_tokens": 48,
    "data.max_len": 128,
    "data.apply_chat_template": True,
    "data.label_key": "label",
    "train.batch_size": 128,
    "train.dynamic_batch_enable": True,
    "train.max_tokens_per_gpu": 8192,
    "ds.param_dtype": "fp32",
    "actor.adam.lr": 5e-4,
    "ckpt.overwrite": True,
}


def reward(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Returns 1 for an answer whose box holds the label, else 0."""
    return [float(f"boxed{{{label}}}" in query) for query, label in zip(queries, labels, strict=True)]


def main(model: str, prompts: str, folder: str, steps: int = 10, flags: dict = FLAGS) -> None:
    with rl.Run(actor=model, **flags, **{"ckpt.output_dir": folder}) as run:
        for questions in islice(run.prompts(prompts, batch_size=16, epochs=100), steps):
            groups = run.reward(run.sample(questions), reward)
            metrics = run.update(run.batch(groups))
            run.sync()
            run.log(metrics, groups)
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
