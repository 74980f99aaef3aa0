"""GRPO by TRL's trainer, with the samples, optimizer steps, loss and KL term of the row `grpo`."""

from collections.abc import Callable
from pathlib import Path

from rl_step import Setting, grpo_trainer
from transformers import TrainerCallback

from openrlhf.rewards.values import read_rewards
from openrlhf.types import not_none
from reproducible.clock import Clock
from reproducible.methods import METHODS, OPTIMIZER_STEPS
from reproducible.rows import Row
from reproducible.tasks import Reward


class Times(TrainerCallback):
    """The times at the end of each batch of samples."""

    def __init__(self) -> None:
        self.clock, self.read = Clock(), []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % OPTIMIZER_STEPS == 0:
            self.read.append(self.clock.read())


def train(
    row: Row, seed: int, start: str, prompts: Path, output: Path
) -> tuple[list[float], list[tuple[float, float]]]:
    """Writes the trained model to `output`. Returns the fraction of solved samples and the times of each
    step."""
    setting = Setting(
        model=start,
        prompts=str(prompts),
        batch_size=row.prompts,
        num_samples=row.samples,
        max_new_tokens=row.task.max_new_tokens,
        steps=row.steps,
        warmup=0,
        learning_rate=row.learning_rate,
        seed=seed,
    )
    grpo, times = METHODS["grpo"].flags, Times()
    trainer = grpo_trainer(
        setting,
        as_trl(not_none(row.task.reward)),
        times,
        optimizer_steps=OPTIMIZER_STEPS,
        micro_batches=row.micro_batches,
        loss_type="grpo",
        temperature=row.task.flags.get("rollout.temperature", 1.0),
        beta=grpo["algo.kl.init_coef"],
        epsilon=grpo["actor.eps_clip"],
    )
    trainer.train()
    trainer.save_model(str(output))
    trainer.processing_class.save_pretrained(output)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return rewards, times.read


def as_trl(reward: Reward) -> Callable:
    def verifier(completions: list[list[dict]], label: list[str], **others) -> list[float]:
        answers = [messages[0]["content"] for messages in completions]
        found = reward(answers, [""] * len(answers), label)
        return [one.reward for one in read_rewards(found, len(answers), "reward")]

    return verifier
