"""Saves the checkpoints of a run, at once or while training goes on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openrlhf.backends.base import Trainable, TrainableRanks
from openrlhf.checkpoint.folder import COPY, CheckpointFolder
from openrlhf.checkpoint.saved import BEST
from openrlhf.config.sections import is_due
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.hooks.base import Hook, announce

# bounded .result(): the cluster's watchdog ends calls to processes that make no progress.

STATE_VERSION = 2
"""Version of the format of the state of an RL run. States of version 1 have no entry `version`."""


class SavedRanks(NamedTuple):
    """The models of a checkpoint of RL: the policy, and the critic if there is one, on ranks of their own."""

    critic: TrainableRanks | None
    policy: TrainableRanks

    def write(self, folder: str, tag: str, state: dict[str, Any]) -> None:
        """Writes models and state; with `ckpt.async_save` it only begins to."""
        if self.critic:
            self.critic.save_checkpoint(tag, {}).result()
        self.policy.save_checkpoint(tag, state).result()

    def finish_writing(self) -> None:
        """Waits until everything is on the disk."""
        for pending in [model.finish_checkpoint() for model in filter(None, self)]:
            pending.result()

    def has_written(self) -> bool:
        """Tells whether `finish_writing` would return without waiting."""
        return all(model.has_written().result() for model in filter(None, self))

    def export(self, folder: str) -> None:
        self.policy.export(folder).result()


@dataclass(frozen=True)
class SavedEngine:
    """The model of a checkpoint of a supervised run, which this rank shares with others."""

    engine: Trainable
    export_model: Callable[[str], None]
    on_any_rank: Callable[[bool], bool]
    later: bool
    """Write checkpoints while training goes on."""

    def write(self, folder: str, tag: str, state: dict[str, Any]) -> None:
        self.engine.save_checkpoint(folder, tag, state, later=self.later)

    def finish_writing(self) -> None:
        self.engine.finish_checkpoint()

    def has_written(self) -> bool:
        return not self.on_any_rank(not self.engine.has_written)

    def export(self, folder: str) -> None:
        self.export_model(folder)


@dataclass(kw_only=True)
class Saver:
    """Saves checkpoints to resume from, Hugging Face copies, or both, as the flags `ckpt.*` select."""

    checkpoints: CheckpointFolder
    models: SavedRanks | SavedEngine
    phase: Callable[[str], AbstractContextManager[object]]
    """Shows that the run saves."""
    hooks: Sequence[Hook] = ()
    commits: Callable[[], bool] = lambda: True
    """True on the rank that makes checkpoints complete."""
    step: int = 0
    """The last step with a checkpoint, apart from those of the best evaluations."""
    unfinished: tuple[str, float | None] | None = field(default=None, init=False)
    """Tag and metric of the checkpoint that is being written while training goes on."""

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is to be saved after this step."""
        return is_due(step, self.checkpoints.ckpt.save_steps)

    def save(
        self, step: int, state: dict[str, Any], metric: float | None = None, *, best: bool = False
    ) -> None:
        """Saves `global_step{step}`. `metric`: by which checkpoints are ranked; `best`: saves it apart, as
        the best one. With `ckpt.async_save` it is still being written when this method returns."""
        self.finish()
        ckpt, tag = self.checkpoints.ckpt, f"{BEST * best}global_step{step}"
        with self.phase("save"), self.checkpoints.writing(commits=self.commits()) as folder:
            if not ckpt.disable_ds:
                self.models.write(str(folder), tag, state)
            if ckpt.save_hf:
                self.models.export(f"{ckpt.folder}/{tag}{COPY}")
            announce(self.hooks, Hook.saving, tag)
        self.unfinished = tag, metric
        if not ckpt.async_save:
            self.finish()
        if not best:
            self.step = step

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and commits it. Collective. Raises
        RunError if it could not be written."""
        if self.unfinished is None:
            return
        (tag, metric), self.unfinished = self.unfinished, None
        with self.phase("save"), self.checkpoints.saving(tag, metric, commits=self.commits()):
            if self.checkpoints.ckpt.async_save:
                self.models.finish_writing()
        announce(self.hooks, Hook.saved, tag)

    def finish_if_written(self) -> None:
        """Commits the checkpoint that is being written, if it is on the disk."""
        if self.unfinished and self.models.has_written():
            self.finish()


def restore(tag: str, policy: TrainableRanks, critic: TrainableRanks | None) -> dict:
    """Loads the models of a checkpoint of RL, and returns the state of the run at that step."""
    if critic:
        critic.load_checkpoint(tag).result()
    return policy.load_checkpoint(tag).result()


def check_version(state: Mapping[str, Any]) -> None:
    """Raises UsageError if a later release of this package wrote the state."""
    if (version := state.get("version", 1)) > STATE_VERSION:
        text = (
            f"the checkpoint has version {version}, and this installation reads up to {STATE_VERSION}.\n"
            "Resume with the release that wrote it, or start a new run."
        )
        raise UsageError(ErrorCode.OTHER_RUN, text, flag="--ckpt.load_enable")
