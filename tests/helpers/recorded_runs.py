"""Synthetic folders of RL runs, as a run writes them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from records import trajectory

from openrlhf.config.commands import PPO
from openrlhf.config.fields import with_values
from openrlhf.config.parse import to_yaml
from openrlhf.observability.journal import Journal, Trained
from openrlhf.tools.replay.recorded import RecordedRun
from openrlhf.types import Batch, Trajectory

STEPS = 3


def samples(step: int) -> list[Trajectory]:
    return [
        trajectory(
            float(i % 2),
            (5, 6, 7, 8),
            prompt_id=10 * step + i // 2,
            sample_index=i % 2,
            versions=[step - 1] * 4,
            extra_logs={"format": 1.0},
        )
        for i in range(4)
    ]


def trained(found: Sequence[Trajectory], step: int, **columns: float) -> Trained:
    """Returns the training data of a step; `columns`: value that is added to the last action's column."""
    batch = Batch.of(list(found))
    n = int(batch.num_actions.sum())
    values = {name: np.full(n, step, np.float32) for name in ("log_probs", "advantages", "returns")}
    for name, value in columns.items():
        values[name][-1] += np.float32(value)
    return Trained(batch=replace(batch, **values), schedule=[[[0, 1]], [[2, 3]]], first_update=2 * step)


def write(
    rollouts: Path, step: int, found: Sequence[Trajectory], name: str = "step", **columns: float
) -> None:
    """Writes a journal. `columns`: see `trained`."""
    journal = Journal(rollouts)
    about = trained([t for t in found if t.ok], step, **columns) if name == "step" else None
    journal.write(step, found, name=name, trained=about)
    journal.close()


@cache
def _rollouts() -> dict[str, bytes]:
    """Returns name -> content of the journals of all steps."""
    with TemporaryDirectory() as folder:
        for step in range(1, STEPS + 1):
            write(Path(folder), step, samples(step))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


class Recording:
    """Writes the folder of an RL run as a run does."""

    def __init__(self, folder: Path, **flags: object) -> None:
        self.folder = folder
        (folder / "run").mkdir(parents=True)
        values = {"ckpt.output_dir": str(folder / "out"), "logger.run_dir": str(folder / "run"), **flags}
        config = with_values(PPO.config_type(), values)
        (folder / "run" / "config.yaml").write_text(to_yaml(config))
        (folder / "run" / "argv.txt").write_text("# start\npython -m openrlhf.cli.train_ppo_ray\n")
        (folder / "run" / "env.json").write_text(json.dumps({"versions": {"torch": "1"}}))
        (folder / "run" / "rollouts").mkdir()
        for name, content in _rollouts().items():
            (folder / "run" / "rollouts" / name).write_bytes(content)
        self.metrics()

    @property
    def run(self) -> RecordedRun:
        return RecordedRun(self.folder / "run")

    def step(self, step: int, found: Sequence[Trajectory], name: str = "step", **columns: float) -> None:
        write(self.folder / "run" / "rollouts", step, found, name, **columns)

    def metrics(self, **changed: float) -> None:
        """`changed`: metrics of step 2, by names without their section."""
        rows = [
            {"step": step, "policy/loss": 0.5, "grad_norm": 1.0, "timing/update": float(id(self) % 97)}
            for step in range(1, STEPS + 1)
        ]
        rows[1] |= changed
        (self.folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def checkpoint(self, step: int, **tensors: float) -> None:
        """Saves a checkpoint of the policy with the torch backend's files."""
        folder = self.folder / "out" / "checkpoints" / "_actor" / f"global_step{step}"
        folder.mkdir(parents=True)
        weights = {f"model.{name}": torch.full((2, 3), value) for name, value in tensors.items()}
        dcp.save(weights, checkpoint_id=folder, no_dist=True)
