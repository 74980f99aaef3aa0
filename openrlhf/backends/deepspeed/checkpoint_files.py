"""Writes and reads the files of DeepSpeed's checkpoints, in place of DeepSpeed's own `torch.save`."""

from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from openrlhf.backends.checkpoint_writer import CheckpointWriter


class DeepSpeedFiles(TorchCheckpointEngine):
    """Passes every file that DeepSpeed saves to `writer`, which each save replaces."""

    writer: CheckpointWriter

    def save(self, state_dict: Any, path: str) -> None:
        self.writer.save(state_dict, path)
