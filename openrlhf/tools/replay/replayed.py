"""The program of a process of `openrlhf replay`, which computes steps of a recorded run again in separate
folders. In supervised learning each rank runs it. In reinforcement learning one process has all models, and
recorded samples replace engines and rewards."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from openrlhf.api import (
    PPO,
    CheckpointFolder,
    Collector,
    ErrorCode,
    PPOConfig,
    StalenessLimit,
    Step,
    UsageError,
    catch_signals,
    choose_hub,
    leave_distributed,
    num_updates,
    parse,
    read_journal,
    short_errors,
    start_local_roles,
)
from openrlhf.api import FoundCheckpoint as Found
from openrlhf.api import SupervisedRun as Run
from openrlhf.api import build_rl_data as build_data
from openrlhf.api import build_rl_trainer as build_trainer
from openrlhf.tools.command_line.run_files import TRAINING, find_task_type
from openrlhf.tools.replay.recorded import RecordedRun


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()  # positions, not flags: torchrun would take --start for its own
    parser.add_argument("command", choices=[command.name for command in TRAINING])
    parser.add_argument("config")
    parser.add_argument("source", type=Path)
    parser.add_argument("start", type=int)
    parser.add_argument("step", type=int)
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    command = next(command for command in TRAINING if command.name == options.command)
    with short_errors():
        catch_signals()
        config = parse(command, ["--config", options.config]).config
        choose_hub(config.use_ms)
        source = RecordedRun(options.source)
        if command is PPO:
            reinforcement(config, source, options.start, options.step)
        else:
            supervised(command.name, config, options.step)


class JournalCollector(Collector):
    """Returns the samples that a recorded run trained on, in the same order."""

    def __init__(self, source: RecordedRun, staleness_limit: StalenessLimit, last_step: int) -> None:
        """`last_step`: the last step whose samples are returned."""
        self._journals, self.staleness_limit, self._last_step = source.rollouts(), staleness_limit, last_step
        self._step = 0

    @property
    def is_exhausted(self) -> bool:
        return self._step == self._last_step

    def fill(self, step: Step) -> None:
        """Sets the samples of an RL step. Limits on failed samples are not checked again, because they count
        samples that the step did not train on too."""
        self._step = step.number
        step.samples = read_journal(self._journals[step.number])

    def state_dict(self) -> dict[str, Any]:
        return {}


def supervised(name: str, config: Any, step: int) -> None:
    with ExitStack() as held:
        trainer = Run(find_task_type(name)(config), [], held).trainer()
        trainer.last_step = step
        try:
            trainer.fit()
        finally:
            if trainer.observer:
                trainer.observer.close()
    leave_distributed()


def reinforcement(config: PPOConfig, source: RecordedRun, start: int, step: int) -> None:
    """Loads the checkpoint of step `start` (0: none) and trains on the recorded samples of the steps up to
    `step`. All models are in this process."""
    checkpoints = CheckpointFolder.of(config)
    found = checkpoints.find() if start else Found(None, [])
    if found.skipped:
        raise UsageError(ErrorCode.DAMAGED_CHECKPOINT, "; ".join(found.skipped), value=source.path)
    if found.tag:
        checkpoints.recall_fork(found.tag)
    data = build_data(config)
    check_one_process(config)
    prompts = len(data.prompts)
    updates, of_critic = num_updates(config, prompts, config.frozen_actor_steps), num_updates(config, prompts)
    roles = start_local_roles(config, updates, of_critic, data.texts)
    trainer = build_trainer(config, [], cast(Any, roles), data, checkpoints, found.tag)
    trainer.collector = JournalCollector(source, trainer.collector.staleness_limit, step)
    trainer.total_steps = step
    try:
        trainer.fit()
    finally:
        trainer.observer.close()


def check_one_process(config: PPOConfig) -> None:
    """Raises UsageError if one process cannot compute what the run's processes computed."""
    sizes = {role: own.mesh.size for role, own in config.placements.items() if role != "reward"}
    if several := [f"{role} {size}" for role, size in sizes.items() if size > 1]:
        text = (
            f"a replay has one rank of each model, but the run had {', '.join(several)}; replay another run"
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--actor.num_gpus_per_node")
    if config.uses_critic and config.ds.lora.dropout > 0:
        text = (
            "policy and critic would draw dropout from one random generator instead of two, so the replay "
            "would differ; runs with a critic can be replayed without dropout of adapters"
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.lora.dropout", value=config.ds.lora.dropout)


if __name__ == "__main__":
    main()
