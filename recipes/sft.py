"""Supervised fine-tuning: the policy learns the answers of a dataset.

    python recipes/sft.py MODEL ROWS FOLDER

For a task of your own change in FLAGS the columns of prompt and answer (`data.input_key`, `data.label_key`),
the length of a row and the learning rate.
"""

import sys
from itertools import islice

import torch

import openrlhf as rl

FLAGS = {
    "data.apply_chat_template": True,
    "data.input_key": "input",
    "data.label_key": "output",
    "data.max_len": 256,
    "algo.kl.init_coef": 0,
    "train.dynamic_batch_enable": True,
    "train.max_tokens_per_gpu": 8192,
    "ds.param_dtype": "fp32",
    "actor.adam.lr": 1e-3,
}


def likelihood(log_probs: torch.Tensor, batch: rl.Batch) -> tuple[torch.Tensor, dict]:
    return -log_probs.mean(), {}


def main(model: str, rows: str, folder: str, steps: int = 10) -> None:
    with rl.Run(actor=model, **FLAGS, **{"ckpt.output_dir": folder}) as run:
        for prompts in islice(run.prompts(rows, batch_size=32, epochs=100), steps):
            groups = run.given(prompts, [prompt.label for prompt in prompts])
            measured = run.forward_backward(run.batch(groups, advantages=1.0, log_probs=False), likelihood)
            run.log(run.optim_step().result() | measured.result())
        run.export(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
