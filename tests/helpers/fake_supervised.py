"""A trainer of supervised learning, of ten samples and an engine that remembers its steps."""

import copy
from pathlib import Path

import torch

from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.config.sections import CkptConfig, LoggerConfig
from openrlhf.config.supervised import EvalConfig, SupervisedConfig, TrainConfig
from openrlhf.data.batches import MiniBatches
from openrlhf.loop.sft import SupervisedTrainer
from openrlhf.observability.observer import Observer
from openrlhf.observability.progress import Progress
from openrlhf.observability.run_folder import RunFolder
from openrlhf.rows import PackedRow, Sample


class Numbers:
    """Dataset whose sample i is the token i, three times."""

    lengths = (3,) * 10

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Sample:
        return Sample(token_ids=torch.full((3,), i), action_mask=torch.tensor([False, True, True]))


class Engine:
    """Engine that remembers which samples were in which step."""

    def __init__(self, disk: dict[str, dict]) -> None:
        self.disk = disk
        self.mini_batches: list[list[int]] = []
        self.evaluations: list[int] = []
        self.exported: list[str] = []

    def train_step(self, mini_batch, objective):
        self.mini_batches.append([int(i) for row in mini_batch for i in row.token_ids[::3]])
        return {"sft/loss": float(len(self.mini_batches))}

    def evaluate(self, rows, objective):
        self.evaluations.append(len(self.mini_batches))
        for row in rows:
            objective(None, row, None)
        return {"sft/loss": 9.0}

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None:
        (Path(folder) / tag).mkdir(parents=True)
        self.disk[tag] = copy.deepcopy(state)

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        return self.disk[tag]

    def export(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        self.exported.append(Path(folder).name)


class Killed(Exception):
    pass


def trainer_of(
    path: Path,
    disk: dict,
    *,
    eval_steps=-1,
    eval_rows=(),
    kill_at: int | None = None,
    max_steps: int | None = None,
    data="10 samples",
    engine: Engine | None = None,
    **ckpt,
):
    config = SupervisedConfig(
        train=TrainConfig(batch_size=4, micro_batch_size=2, max_epochs=3, max_steps=max_steps),
        eval=EvalConfig(steps=eval_steps),
        ckpt=CkptConfig(path=str(path / "ckpt"), **ckpt),
    )
    engine = engine or Engine(disk)
    origin = RunFingerprint.of("sft", config, {"--data.dataset": data})
    trainer = SupervisedTrainer(
        config=config,
        engine=engine,
        objective=lambda model, row, norm: None,
        mini_batches=MiniBatches(
            Numbers(), PackedRow.of, batch_size=4, micro_batch_size=2, data_rank=0, data_size=1, seed=7
        ),
        eval_rows=eval_rows,
        checkpoints=CheckpointFolder(config.ckpt.folder, config.ckpt, fingerprint=origin),
        export=engine.export,
        observer=None,
    )
    tag = trainer.checkpoints.find().tag
    if tag:
        trainer.resume(tag)
    folder = RunFolder.create(path / "run", config_yaml="{}", argv=["test"], resume=tag is not None)
    trainer.observer = Observer(folder, LoggerConfig(), resume_step=trainer.step if tag else None)
    trainer.observer.progress = Progress(show=False)
    trainer.observer.start(9, done=trainer.step)
    if kill_at is not None:
        take_step = engine.train_step

        def dying_step(mini_batch, objective):
            if trainer.step == kill_at:
                raise Killed
            return take_step(mini_batch, objective)

        engine.train_step = dying_step
    return trainer
