"""A pretrained model that learns: GRPO in one process, without Ray and vLLM."""

import openrlhf as rl  # first: it repairs imports of CUDA builds

# isort: split
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from gpukit.inside import ROOT
from gpukit.stage import Figures, Setting
from openrlhf.tasks.prepare import FINAL_ANSWER_REWARD
from openrlhf.types import Metrics

FLAGS: dict[str, Any] = {
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "reward.remote_url": str(FINAL_ANSWER_REWARD),
    "reward.batch": 32,
    "rollout.n_samples_per_prompt": 8,
    "rollout.max_new_tokens": 24,
    "rollout.temperature": 0.7,
    "eval.temperature": 0.7,
    "eval.n_samples_per_prompt": 1,
    "data.max_len": 128,
    "data.apply_chat_template": True,
    "data.label_key": "label",
    "train.dynamic_batch_enable": True,
    "train.max_tokens_per_gpu": 4096,
    "actor.adam.lr": 3e-5,
    "ds.param_dtype": "fp32",
    "ckpt.overwrite": True,
}
EVERY = 10
"""Steps between two points of the curve."""


def learn(setting: Setting, folder: str, task: str, steps: int = 40) -> Figures:
    """Trains a model on problems of reasoning-gym. It must answer more problems of another seed after the
    last step than before the first. `folder`: the model, relative to the project.

    Figures: the curve of that share, seconds of a step, and sampled tokens per second.
    """
    steps, prompts, held_out = setting.size((steps, 16, 128), (2, 2, 4))
    curve: list[float] = []
    tokens, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        flags = FLAGS | {"train.batch_size": 8 * prompts, "ckpt.output_dir": str(Path(name) / "policy")}
        with rl.Run(actor=str(ROOT / folder), **flags) as run:
            questions = next(run.prompts(f"reasoning_gym:{task}&size={held_out}&seed=1000003"))
            source = run.prompts(f"reasoning_gym:{task}&size={steps * prompts}&seed=0", batch_size=prompts)
            for number, batch in enumerate(islice(source, steps)):
                if number % EVERY == 0:
                    curve.append(share(run.evaluate(questions).result()))
                groups = run.sample(batch).result()
                tokens += sum(sample.num_actions for group in groups for sample in group.trajectories)
                run.log(run.update(run.batch(groups)), groups)
                run.sync()
            curve.append(share(run.evaluate(questions).result()))
            seconds = time.monotonic() - began
    assert setting.rehearsal or curve[-1] > curve[0], f"it learned nothing: {curve}"
    return {
        "right answers": " ".join(f"{value:.2f}" for value in curve),
        "s/step": seconds / steps,
        "sampled tokens/s": tokens / seconds,
    }


def share(metrics: Metrics) -> float:
    """Returns the share of problems that were answered."""
    return next(value for name, value in metrics.items() if name.endswith("_score_mean"))
