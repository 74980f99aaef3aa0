"""`openrlhf replay`: what it starts from, what it refuses, and what its comparison finds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from recorded_runs import Recording, samples
from refusals import printed, refused

from openrlhf.checkpoint.manifest import Entry, Manifest
from openrlhf.errors import ErrorCode
from openrlhf.observability.hooks.base import Step
from openrlhf.tools.replay import rerun
from openrlhf.tools.replay.flags import replay as replay_command
from openrlhf.tools.replay.replay import run as replay
from openrlhf.tools.replay.replayed import JournalCollector
from openrlhf.tools.replay.rerun import Rerun, build_environment, compare, configured
from openrlhf.tools.replay.tensors import compare_checkpoints, have_same_hashes
from openrlhf.training.collect import StalenessLimit
from openrlhf.types import Image


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "recorded")


def computed_again(recording: Recording, folder: Path, step: int) -> Rerun:
    """Returns a rerun whose result is an equal run."""
    Recording(folder)
    return Rerun(run=recording.run, step=step, folder=folder)


def test_it_starts_from_the_newest_checkpoint_before_the_step(recording, tmp_path):
    rerun = lambda step: Rerun(run=recording.run, step=step, folder=tmp_path)
    assert [rerun(step).start for step in (1, 2, 3)] == [0, 0, 0]
    recording.checkpoint(1, head=0.5)
    recording.checkpoint(2, head=0.5)
    assert [rerun(step).start for step in (1, 2, 3)] == [0, 1, 2]
    assert rerun(2).settings["ckpt.save_steps"] == 2 and rerun(3).settings["ckpt.save_steps"] == -1
    assert rerun(3).settings["ckpt.load_enable"] and not rerun(1).settings["ckpt.load_enable"]


def test_it_reads_links_and_writes_elsewhere(recording, tmp_path):
    recording.checkpoint(2, head=0.5)
    folder = tmp_path / "again"
    folder.mkdir()
    rerun = Rerun(run=recording.run, step=3, folder=folder)
    rerun._link_checkpoint()
    link = folder / "checkpoints" / "_actor" / "global_step2"
    assert link.is_symlink() and link.resolve() == recording.run.checkpoints()[2]["actor"].resolve()
    assert (link.parent / "latest").read_text() == "global_step2"
    file = configured(recording.run, rerun.settings, folder / "replay.yaml")
    written = yaml.safe_load(file.read_text())
    assert (
        written["logger"]["run_dir"] == f"{folder}/run" and written["ckpt"]["path"] == f"{folder}/checkpoints"
    )
    assert written["train"] == yaml.safe_load((recording.run.path / "config.yaml").read_text())["train"] | {
        "max_restarts": 0,
        "verify_steps": 0,
    }


def test_threads_are_those_of_the_run(recording, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    variables = {"versions": {}, "variables": {"OMP_NUM_THREADS": 3, "RANK": "1"}}
    (recording.run.path / "env.json").write_text(json.dumps(variables))
    found = build_environment(recording.run)
    assert found["OMP_NUM_THREADS"] == "3" and "MKL_NUM_THREADS" not in found


def test_processes_of_ray_have_one_thread_unless_the_run_says_otherwise(recording, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert build_environment(recording.run)["OMP_NUM_THREADS"] == "1"


def test_a_run_of_two_ranks_is_computed_again_by_two(recording, tmp_path, monkeypatch):
    (recording.run.path / "argv.txt").write_text("python -m openrlhf.cli.train_sft\n")
    (recording.run.path / "env.json").write_text(json.dumps({"variables": {"WORLD_SIZE": "2"}}))
    started = []
    monkeypatch.setattr(rerun, "run_job", lambda words, output, **options: started.append((words, options)))
    Rerun(run=recording.run, step=3, folder=tmp_path).compute()
    words, options = started[0]
    assert options["ranks"] == 2
    file, source = str(tmp_path / "replay.yaml"), str(recording.run.path)
    assert words == ["openrlhf.cli.replayed", "sft", file, source, "0", "3"]


def test_steps_that_are_not_recorded_are_refused(recording, tmp_path):
    with refused(ErrorCode.NOT_FOUND, flag="--step", value=4):
        Rerun(run=recording.run, step=4, folder=tmp_path).check()
    Rerun(run=recording.run, step=3, folder=tmp_path).check()
    (recording.run.path / "rollouts" / "step_000002.parquet").unlink()
    with refused(ErrorCode.NOT_FOUND, flag="--step", value=3):
        Rerun(run=recording.run, step=3, folder=tmp_path).check()
    recording.checkpoint(2, head=0.5)
    Rerun(run=recording.run, step=3, folder=tmp_path).check()


def test_runs_whose_journal_lacks_something_are_refused(tmp_path):
    with refused(ErrorCode.UNSUPPORTED, flag="--algo.router_replay"):
        routed = Recording(tmp_path / "routed", **{"algo.router_replay": True})
        Rerun(run=routed.run, step=2, folder=tmp_path).check()
    truncated = Recording(tmp_path / "truncated", **{"rollout.top_k": 4})
    Rerun(run=truncated.run, step=2, folder=tmp_path).check()
    path = truncated.run.rollouts()[1]
    pq.write_table(pq.read_table(path).drop_columns(["kept_ids"]), path)
    with refused(ErrorCode.UNSUPPORTED, value=path):
        Rerun(run=truncated.run, step=2, folder=tmp_path).check()
    old = Recording(tmp_path / "old")
    path = old.run.rollouts()[2]
    pq.write_table(pq.read_table(path).drop_columns(["images"]), path)
    Rerun(run=old.run, step=2, folder=tmp_path).check()
    few = Recording(tmp_path / "few")
    table = pq.read_table(path := few.run.rollouts()[2])
    pq.write_table(table.slice(0, 1), path)
    with refused(ErrorCode.NOT_FOUND, value=path):
        Rerun(run=few.run, step=2, folder=tmp_path).check()
    images = Recording(tmp_path / "images")
    images.step(2, [replace(t, images=(Image("a.png", b""),)) for t in samples(2)])
    with refused(ErrorCode.UNSUPPORTED, value=images.run.rollouts()[2]):
        Rerun(run=images.run, step=3, folder=tmp_path).check()


def test_samples_come_from_the_journal(recording):
    collector = JournalCollector(recording.run, StalenessLimit(batch_size=2), last_step=3)
    for step in (2, 3):
        assert not collector.is_exhausted
        collector.fill(found := Step(number=step, version=0))
        assert [t.sample for t in found.samples] == [t.sample for t in samples(step)]
        assert not (found.collected or found.filtered or found.metrics)
    assert collector.is_exhausted and collector.state_dict() == {}


def test_an_equal_step_is_equal(recording, tmp_path):
    result = compare(computed_again(recording, tmp_path / "again", 3))
    assert result.is_equal
    assert {(s.step, s.name) for s in result.stages} >= {(3, "rollouts"), (3, "metrics")}
    assert any("checkpoint" in reason for reason in result.not_compared)


def test_a_tampered_journal_is_found(recording, tmp_path):
    rerun = computed_again(recording, tmp_path / "again", 3)
    recording.step(3, samples(3), log_probs=2**-20)
    result = compare(rerun)
    assert not result.is_equal
    (stage,) = [stage for stage in result.stages if stage.differing]
    assert (stage.step, stage.differing[0].quantity) == (3, "log_probs")
    assert stage.differing[0].largest == pytest.approx(2**-20, rel=0.1)


def test_tampered_metrics_are_found(recording, tmp_path):
    rerun = computed_again(recording, tmp_path / "again", 2)
    recording.metrics(grad_norm=float(np.nextafter(1.0, 2.0)))
    (stage,) = [stage for stage in compare(rerun).stages if stage.differing]
    assert (stage.step, stage.name, stage.differing[0].quantity) == (2, "metrics", "grad_norm")


def test_a_tampered_checkpoint_is_found(recording, tmp_path):
    """A weight that was changed after the run, with the manifest as it was."""
    rerun = computed_again(recording, tmp_path / "again", 2)
    recording.checkpoint(2, head=0.5)
    own = rerun.folder / "checkpoints" / "_actor" / "global_step2"
    own.mkdir(parents=True)
    (rerun.folder / "run" / "config.yaml").write_text(
        yaml.safe_dump({"ckpt": {"path": str(rerun.folder / "checkpoints"), "output_dir": "out"}})
    )
    weights = torch.full((2, 3), 0.5)
    weights[1, 2] += 2**-20
    dcp.save({"model.head": weights}, checkpoint_id=own, no_dist=True)
    (stage,) = [stage for stage in compare(rerun).stages if stage.differing]
    assert stage.name == "checkpoint of the actor"
    assert stage.differing[0].first.startswith("element [1, 2]: 0.5 | ")


def test_checkpoints_with_the_same_hashes_are_not_read(tmp_path):
    """Files without tensors may differ; of two tensors' files one is enough."""

    def checkpoint(name: str, **hashes: str) -> Path:
        files = {file.replace("__", "."): Entry(3, sha256) for file, sha256 in hashes.items()}
        (tmp_path / name).mkdir()
        Manifest(files=files, step=1).write(tmp_path / name)
        return tmp_path / name

    one = checkpoint("one", weights__pt="a", origin__json="b", random_state_0__pt="c")
    other = checkpoint("other", weights__pt="a", origin__json="d")
    changed = checkpoint("changed", weights__pt="e", origin__json="b", random_state_0__pt="c")
    assert have_same_hashes(one, other) and not have_same_hashes(one, changed)
    (tmp_path / "none").mkdir()
    assert not have_same_hashes(one, tmp_path / "none")
    assert [*compare_checkpoints(one, other)] == []


def test_what_engines_measure_is_not_compared(recording, tmp_path):
    rerun = computed_again(recording, tmp_path / "again", 2)
    recording.metrics(**{"eval/math_score_mean": 0.5, "rollout/num_prompts": 8.0})
    result = compare(rerun)
    assert result.is_equal
    assert any("rollout/num_prompts, eval/math_score_mean" in reason for reason in result.not_compared)


@pytest.mark.parametrize("name", ["a_file", "full"])
def test_a_folder_that_is_a_file_or_not_empty_is_refused(recording, tmp_path, name):
    (tmp_path / "full").mkdir()
    for path in (tmp_path / "a_file", tmp_path / "full" / "file"):
        path.write_text("")
    (recording.run.path / "argv.txt").write_text("python -m openrlhf.cli.train_sft\n")
    with refused(ErrorCode.NOT_WRITABLE, flag="--folder", value=tmp_path / name):
        replay(recording.run.path, 3, tmp_path / name)


def test_the_command_passes_on_its_options(recording, tmp_path, capsys):
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "file").touch()
    for words in (["--step", "3", "--folder", str(folder)], ["--step", "9"]):
        with pytest.raises(SystemExit) as stop:
            replay_command([str(recording.run.path), *words])
        assert stop.value.code == 2
    told = [(problem.code, problem.place) for problem in printed(capsys.readouterr().err)]
    assert told == [(ErrorCode.NOT_WRITABLE, f"--folder {folder}"), (ErrorCode.NOT_FOUND, "--step 9")]


def test_metrics_of_hooks_are_named_and_not_compared(tmp_path):
    recording = Recording(tmp_path / "hooked", **{"train.hooks": "hooks.py"})
    rerun = computed_again(recording, tmp_path / "again", 2)
    recording.metrics(**{"mine/value": 7.0})
    result = compare(rerun)
    assert result.is_equal
    assert "metrics of hooks (--train.hooks)" in result.not_compared


def test_steps_without_metrics_are_named(recording, tmp_path):
    rerun = computed_again(recording, tmp_path / "again", 3)
    path = recording.run.path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    assert "metrics of steps 1, 2: the run did not log them" in compare(rerun).not_compared
