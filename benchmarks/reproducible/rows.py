"""Rows of the table: a method, on a task, with a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from reproducible.methods import METHODS, OPTIMIZER_STEPS, Method
from reproducible.tasks import TASKS, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    model: str
    """tiny: the demo's model of a quarter of a million weights. smollm2: SmolLM2-135M-Instruct."""
    task_name: str
    method_name: str
    steps: int
    prompts: int = 32
    """Prompts of a step."""
    samples: int = 8
    """Samples of each prompt."""
    learning_rate: float = 5e-4
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    """True if the scheduled workflow repeats the row."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.task_name}-{self.method_name}"

    @property
    def micro_batches(self) -> int:
        """Parts of an optimizer step of TRL, 16 samples each of SmolLM2: logits of 64 take 10 GB."""
        return 1 if self.model == "tiny" else self.samples_per_step // OPTIMIZER_STEPS // 16

    @property
    def task(self) -> Task:
        return TASKS[self.task_name]

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.samples

    def flags(self, seed: int) -> dict[str, Any]:
        """Returns the flags of `openrlhf ppo`, without those that name models, files and folders."""
        task = self.task
        return {
            "rollout.n_samples_per_prompt": self.samples,
            "rollout.max_new_tokens": task.max_new_tokens,
            "data.max_len": task.max_len,
            "data.label_key": "label",
            "data.apply_chat_template": True,
            "train.batch_size": self.samples_per_step // OPTIMIZER_STEPS,
            "train.dynamic_batch_enable": True,
            "train.max_tokens_per_gpu": 8192 if self.model == "tiny" else 2048,
            "train.seed": seed,
            "ds.param_dtype": "fp32",
            "actor.adam.lr": self.learning_rate,
            "ckpt.overwrite": True,
            **task.flags,
            **self.method.flags,
        }


PRETRAINED: dict[str, Any] = {"steps": 12, "prompts": 16, "learning_rate": 3e-5}


def _rows() -> Iterator[Row]:
    for method in METHODS:
        quick = method in ("grpo", "dpo")
        yield Row(model="tiny", task_name="words", method_name=method, steps=8, quick=quick)
    for method in ("grpo", "rloo", "ppo", "dpo", "best_of_n", "trl_grpo"):
        yield Row(model="tiny", task_name="sums", method_name=method, steps=12)
    for task, method in product(("countdown", "spelling", "guess"), ("grpo", "rloo", "ppo")):
        yield Row(model="tiny", task_name=task, method_name=method, steps=12)
    for method in ("grpo", "dpo", "best_of_n", "trl_grpo"):
        yield Row(model="smollm2", task_name="chain_sum", method_name=method, **PRETRAINED)


ROWS = {row.name: row for row in _rows()}
