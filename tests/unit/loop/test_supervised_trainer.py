import copy
import re
from itertools import chain
from pathlib import Path

import pytest
from fake_supervised import Engine, Killed, trainer_of
from refusals import refused

from openrlhf.backends.finite import NotFiniteError
from openrlhf.checkpoint.folder import UNFINISHED
from openrlhf.errors import ErrorCode, RunError, Stopped
from openrlhf.loop.sft import SupervisedTrainer
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.rows import PackedRow


def test_every_epoch_visits_everything_in_an_order_of_its_own(tmp_path):
    trainer = trainer_of(tmp_path, {})
    trainer.fit()
    mini_batches = trainer.engine.mini_batches
    assert [len(w) for w in mini_batches] == [4, 4, 2] * 3
    epochs = [list(chain(*mini_batches[i : i + 3])) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert trainer.step == 9
    assert list(read_metrics(tmp_path / "run" / "metrics.jsonl")) == list(range(1, 10))


@pytest.mark.parametrize("kill_at", [1, 2, 3, 4, 5, 6, 8])
def test_a_resumed_run_visits_exactly_what_was_left(tmp_path, kill_at):
    """The run is killed before the step after `kill_at` and saves every 2 steps, also in the middle of an
    epoch of 3."""
    whole = trainer_of(tmp_path / "whole", {})
    whole.fit()
    disk: dict[str, dict] = {}
    first = trainer_of(tmp_path / "halves", disk, kill_at=kill_at, save_steps=2)
    with pytest.raises(Killed):
        first.fit()
    second = trainer_of(tmp_path / "halves", disk, save_steps=2)
    done = kill_at // 2 * 2
    assert second.step == done
    second.fit()
    assert first.engine.mini_batches[:done] + second.engine.mini_batches == whole.engine.mini_batches
    assert second.step == 9
    assert list(read_metrics(tmp_path / "halves" / "run" / "metrics.jsonl")) == list(range(1, 10))


@pytest.mark.usefixtures("outlives_stops")
@pytest.mark.parametrize("rank", ["this", "another"])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_run_that_is_asked_to_stop_saves_the_step(tmp_path, at, rank):
    whole = trainer_of(tmp_path / "whole", {})
    whole.fit()
    disk: dict[str, dict] = {}
    first = trainer_of(tmp_path / "halves", disk, save_steps=2)
    first.on_any_rank = lambda asked: asked or (rank == "another" and first.step == at)
    take_step = first.engine.train_step

    def step(window, objective):
        if first.step + 1 == at and rank == "this":
            first.stop.number = 15
        return take_step(window, objective)

    first.engine.train_step = step
    with pytest.raises(Stopped) as stopped:
        first.fit()
    assert (first.step, stopped.value.code, list(disk)[-1]) == (at, 75, f"global_step{at}")
    second = trainer_of(tmp_path / "halves", disk, save_steps=2)
    second.fit()
    assert first.engine.mini_batches + second.engine.mini_batches == whole.engine.mini_batches


@pytest.mark.parametrize("told", ["10 samples", "11 samples"])
def test_a_checkpoint_whose_origin_is_in_its_state(tmp_path, told):
    """The run compares data, batch size and seed with the checkpoint's."""
    first = trainer_of(tmp_path, {}, kill_at=3, save_steps=2)
    with pytest.raises(Killed):
        first.fit()
    origin = {"--train.batch_size": 16, "--train.seed": 42, "--data.dataset": told}
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.load_enable") as error:
        trainer_of(tmp_path, {"global_step2": {"step": 2, "origin": origin}})
    assert re.search(r"--train\.batch_size\b.*\b16\b.*\b4\b", error.value.text)
    assert ("--data.dataset" in error.value.text) == (told == "11 samples")


@pytest.mark.parametrize(("every", "steps"), [(-1, [3, 6, 9]), (2, [2, 4, 6, 8]), (0, [])])
def test_evaluations_run_every_eval_steps(tmp_path, every, steps):
    trainer = trainer_of(tmp_path, {}, eval_steps=every, eval_rows=[PackedRow.empty()])
    trainer.fit()
    assert trainer.engine.evaluations == steps
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [s for s in metrics if metrics[s].get("eval/sft/loss") == 9.0] == steps


def test_an_evaluation_is_a_phase_of_its_own_with_its_rows_counted(tmp_path):
    rows = [PackedRow.empty()] * 3
    trainer = trainer_of(tmp_path, {}, eval_rows=rows, save_steps=3)
    seen = []
    trainer.objective = lambda model, row, norm: seen.append(trainer.observer.current.line().split()[:2])
    trainer.fit()
    assert seen == [["evaluate", f"{n}/3"] for n in (1, 2, 3)] * 3
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step for step in metrics if "timing/evaluate" in metrics[step]] == [3, 6, 9]
    assert [step for step in metrics if "timing/save" in metrics[step]] == [4, 7]


def test_an_objective_with_a_statistic_of_its_batch_is_prepared_for_evaluation_rows_too(tmp_path):
    rows = [PackedRow.empty()] * 2
    trainer = trainer_of(tmp_path, {}, eval_rows=rows, max_steps=3)
    prepared, used = [], []

    def prepare(of):
        prepared.append(of)
        return lambda model, row, norm: used.append(len(prepared))

    trainer.prepare = prepare
    trainer.fit()
    assert prepared[-1] == rows
    assert used == [4, 4]  # after those of three steps


@pytest.mark.parametrize(
    ("max_steps", "steps", "evaluations"), [(2, 2, [2]), (5, 5, [3, 5]), (6, 6, [3, 6]), (99, 9, [3, 6, 9])]
)
def test_max_steps_cuts_a_run_short(tmp_path, max_steps, steps, evaluations):
    whole = trainer_of(tmp_path / "whole", {})
    whole.fit()
    trainer = trainer_of(tmp_path / "cut", {}, max_steps=max_steps, eval_rows=[PackedRow.empty()])
    trainer.fit()
    assert trainer.engine.mini_batches == whole.engine.mini_batches[:steps]
    assert trainer.step == trainer.total_steps == steps
    assert trainer.engine.evaluations == evaluations


@pytest.mark.parametrize(("max_steps", "steps"), [(2, 2), (4, 4), (7, 7), (None, 9)])
def test_a_resumed_run_stops_where_max_steps_says(tmp_path, max_steps, steps):
    """A run that has already made more steps stops there too."""
    disk: dict[str, dict] = {}
    first = trainer_of(tmp_path, disk, save_steps=2, max_steps=4)
    first.fit()
    second = trainer_of(tmp_path, disk, save_steps=2, max_steps=max_steps)
    assert second.step == 4
    second.fit()
    assert second.step == max(4, steps)
    whole = trainer_of(tmp_path / "whole", {})
    whole.fit()
    assert first.engine.mini_batches + second.engine.mini_batches == whole.engine.mini_batches[: second.step]


def test_without_evaluation_rows(tmp_path):
    trainer = trainer_of(tmp_path, {}, eval_steps=1)
    trainer.fit()
    assert trainer.engine.evaluations == []


def test_checkpoints_and_copies(tmp_path):
    trainer = trainer_of(tmp_path, {}, save_steps=2, max_num=2, save_hf=True)
    trainer.fit()
    assert trainer.engine.exported == [f"global_step{s}_hf" for s in (2, 4, 6, 8)]
    left = sorted(p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir())
    copies = [f"global_step{s}_hf" for s in (6, 8)]
    assert left == sorted(["global_step6", "global_step8", *copies])
    assert trainer.checkpoints.find().tag == "global_step8"


def test_copies_alone(tmp_path):
    trainer = trainer_of(tmp_path, {}, save_steps=4, save_hf=True, disable_ds=True)
    trainer.fit()
    assert trainer.engine.exported == ["global_step4_hf", "global_step8_hf"]
    assert trainer.checkpoints.find().tag is None


def test_a_rank_without_an_observer_completes_nothing(tmp_path):
    """Only rank 0 decides which checkpoints count."""
    trainer = trainer_of(tmp_path, {}, save_steps=4)
    trainer.observer = None
    trainer.fit()
    assert trainer.step == 9
    assert sorted(trainer.engine.disk) == ["global_step4", "global_step8"]
    assert trainer.checkpoints.find().tag is None


class Slow(Engine):
    """Engine whose checkpoints are on the disk `steps` steps after the save began, or never."""

    begun: str | None = None
    fails = False

    def __init__(self, disk: dict[str, dict], steps: int) -> None:
        super().__init__(disk)
        self.steps, self.kept = steps, {}

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None:
        assert later and self.begun is None
        self.begun, self.ready = tag, len(self.mini_batches) + self.steps
        (Path(folder) / tag).mkdir(parents=True)
        self.kept = copy.deepcopy(state)

    @property
    def has_written(self) -> bool:
        return self.begun is None or len(self.mini_batches) >= self.ready

    def finish_checkpoint(self) -> None:
        assert self.begun
        if self.fails:
            raise RunError(ErrorCode.NOT_WRITABLE, "the disk is full")
        self.disk[self.begun], self.begun = self.kept, None


def saving_later(path: Path, steps: int, **ckpt) -> tuple[SupervisedTrainer, Slow]:
    engine = Slow({}, steps)
    return trainer_of(path, {}, engine=engine, async_save=True, **ckpt), engine


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    """It is complete at the end of the step at which its files are on the disk."""
    trainer, engine = saving_later(tmp_path, 2, save_steps=4)
    complete: list[str | None] = []
    take_step = engine.train_step

    def step(window, objective):
        complete.append(trainer.checkpoints.find().tag)
        return take_step(window, objective)

    engine.train_step = step
    trainer.fit()
    assert complete == [None] * 6 + ["global_step4"] * 3
    assert trainer.checkpoints.find().tag == "global_step8", "the end of the run waits for it"
    assert list(engine.disk) == ["global_step4", "global_step8"]


@pytest.mark.usefixtures("outlives_stops")
@pytest.mark.parametrize(("stop_at", "saved"), [(4, 4), (5, 5)])
def test_the_next_save_and_a_stop_wait_for_the_one_under_way(tmp_path, stop_at, saved):
    trainer, engine = saving_later(tmp_path, 100, save_steps=2)
    trainer.on_any_rank = lambda asked: asked or trainer.step == stop_at
    with pytest.raises(Stopped):
        trainer.fit()
    assert trainer.checkpoints.find().tag == f"global_step{saved}"
    assert list(engine.disk) == [f"global_step{step}" for step in sorted({2, 4, saved})]


def test_an_error_of_writing_is_raised_at_the_end_of_a_later_step(tmp_path):
    trainer, engine = saving_later(tmp_path, 1, save_steps=2)
    engine.fails = True
    with refused(ErrorCode.NOT_WRITABLE):
        trainer.fit()
    assert trainer.step == 3
    assert trainer.checkpoints.find().tag is None and not (trainer.checkpoints.path / UNFINISHED).exists()


def test_a_step_that_is_not_finite_costs_no_checkpoint_of_an_earlier_step(tmp_path):
    trainer, engine = saving_later(tmp_path, 100, save_steps=2)
    take_step = engine.train_step

    def step(window, objective):
        if trainer.step == 3:
            raise NotFiniteError(ErrorCode.NOT_FINITE, "loss is nan")
        return take_step(window, objective)

    engine.train_step = step
    with refused(ErrorCode.NOT_FINITE):
        trainer.fit()
    assert trainer.checkpoints.find().tag == "global_step2"
