"""Writes and reads the files of DeepSpeed's checkpoints, in place of DeepSpeed's own `torch.save`."""

from typing import Any, Self

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from openrlhf.backends.checkpoint_writer import CheckpointWriter


class DeepSpeedFiles(TorchCheckpointEngine):
    """Passes every file that DeepSpeed saves to `writer`, which each save replaces."""

    writer: CheckpointWriter

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Makes an engine save through the returned object. DeepSpeed copies its scripts beside a checkpoint
        on rank 0, between collectives, so a failure there waits for `CheckpointWriter.finish` too."""
        files = engine.checkpoint_engine = cls()
        copy = engine._copy_recovery_script
        engine._copy_recovery_script = lambda folder: files.writer.attempt(folder, lambda: copy(folder))
        return files

    def save(self, state_dict: Any, path: str) -> None:
        self.writer.save(state_dict, path)
