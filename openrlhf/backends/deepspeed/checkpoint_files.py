"""Makes DeepSpeed write its checkpoint files with a `CheckpointWriter`, and unpickle only known types."""

from typing import Any, Self

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from openrlhf.backends import own_pickles
from openrlhf.backends.checkpoint_writer import CheckpointWriter

DEEPSPEED = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""DeepSpeed's own types in its checkpoint files."""


class DeepSpeedFiles(TorchCheckpointEngine):
    """A DeepSpeed checkpoint engine that passes every file to `writer`, which is set anew for each save."""

    writer: CheckpointWriter

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Makes an engine save through the returned object. Rank 0's copy of DeepSpeed's recovery script goes
        through the writer, too: it lies between collectives, so that a failure must not raise before
        `CheckpointWriter.finish`."""
        files = engine.checkpoint_engine = cls()
        copy = engine._copy_recovery_script
        engine._copy_recovery_script = lambda folder: files.writer.attempt(folder, lambda: copy(folder))
        return files

    def save(self, state_dict: Any, path: str) -> None:
        self.writer.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return own_pickles.load(path, DEEPSPEED)
