"""`openrlhf bisect` on synthetic run folders: each kind of difference is found, in causal order."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import Recording, samples
from refusals import refused

from openrlhf.config.commands import SFT
from openrlhf.config.parse import to_yaml
from openrlhf.errors import ErrorCode
from openrlhf.tools.replay import replay as command
from openrlhf.tools.replay.compare import bisect, describe_cause
from openrlhf.tools.replay.differences import NUMBER, ORDER, same
from openrlhf.types import Trajectory, runs


@pytest.fixture
def pair(tmp_path):
    return Recording(tmp_path / "a"), Recording(tmp_path / "b")


def changed(step: int, index: int, **fields: object) -> list[Trajectory]:
    found = samples(step)
    found[index] = replace(found[index], **fields)
    return found


def first(a: Recording, b: Recording) -> tuple[int, str, str]:
    result = bisect(a.run, b.run)
    assert result.first is not None
    return result.first.step, result.first.name, result.first.differing[0].quantity


def test_equal_runs(pair, capsys):
    a, b = pair
    for recording in pair:
        recording.checkpoint(2, head=0.5)
    result = bisect(a.run, b.run)
    assert result.first is None and result.are_equal
    assert {(s.step, s.name) for s in result.equal} >= {(1, "rollouts"), (3, "metrics")}
    assert command.bisect_runs(a.run.path, b.run.path) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_run_with_more_samples(pair):
    a, b = pair
    b.step(2, [*samples(2), replace(samples(2)[3], sample_index=2)])
    result = bisect(a.run, b.run)
    assert result.first is not None
    (found,) = result.first.differing
    assert (result.first.step, found.quantity, found.first) == (2, NUMBER, "4 | 5")


LOWER = np.array([-1, -1, -1 - 1e-6, -1], np.float32)
CHANGES = [
    ({"seed": 3}, "seed"),
    ({"token_ids": np.array([1, 5, 6, 9, 8], np.int32)}, "token_ids"),
    ({"rollout_log_probs": LOWER}, "rollout_log_probs"),
    ({"weight_versions": runs([1, 1, 2, 2])}, "weight_versions"),
    ({"reward": 3.0}, "reward"),
    ({"score": 3.0, "reward": 3.0}, "score"),
    ({"extra_logs": {"format": 0.0}}, "extra_logs"),
    ({"extra_texts": {"judge": "no"}}, "extra_texts"),
    ({"finish_reason": "length"}, "finish_reason"),
    ({"sample_index": 4}, ORDER),
]


@pytest.mark.parametrize(("fields", "quantity"), CHANGES, ids=[quantity for _, quantity in CHANGES])
@pytest.mark.few(4)
def test_a_sample_differs(pair, fields, quantity):
    a, b = pair
    b.step(2, changed(2, 1, **fields))
    b.step(3, changed(3, 0, reward=7.0))
    assert first(a, b) == (2, "rollouts", quantity)


def test_log_probs_before_a_token_come_first(pair):
    """The distribution differs before it leads to another token."""
    a, b = pair
    tokens = np.array([1, 5, 6, 7, 9], np.int32)
    b.step(2, changed(2, 3, token_ids=tokens, rollout_log_probs=LOWER))
    assert first(a, b) == (2, "rollouts", "rollout_log_probs")
    found = bisect(a.run, b.run).first.differing[0]
    assert "prompt 21 sample 1" in found.first and "token 3 (action 2)" in found.first
    tokens = np.array([1, 5, 9, 7, 8], np.int32)
    b.step(2, changed(2, 3, token_ids=tokens, rollout_log_probs=LOWER))
    assert first(a, b) == (2, "rollouts", "token_ids")


@pytest.mark.parametrize("name", ["log_probs", "advantages", "returns"])
def test_training_differs(pair, name):
    a, b = pair
    b.step(2, samples(2), **{name: 0.25})
    assert first(a, b) == (2, "rollouts", name)
    found = bisect(a.run, b.run).first.differing[0]
    assert found.largest == 0.25 and found.number == "1 of 4 samples"
    assert "row 3, prompt 21 sample 1 of epoch 0, token 4 (action 3)" in found.first


def test_bits_are_compared(pair):
    """NaN equals NaN, and 0.0 differs from -0.0."""
    for recording in pair:
        recording.step(2, samples(2), log_probs=float("nan"))
    assert bisect(pair[0].run, pair[1].run).first is None
    assert same(float("nan"), float("nan")) and not same([0.0], [-0.0])


def test_only_metrics_differ(pair):
    a, b = pair
    b.metrics(grad_norm=1.5)
    assert first(a, b) == (2, "metrics", "grad_norm")


def test_filtered_samples_and_evaluations(pair):
    a, b = pair
    for recording, reward in ((a, 0.0), (b, 1.0)):
        recording.step(3, changed(3, 0, reward=reward), name="eval")
    assert first(a, b) == (3, "evaluation", "reward")
    for recording, reward in ((a, 0.0), (b, 1.0)):
        recording.step(3, changed(3, 0, reward=reward), name="filtered")
    assert first(a, b) == (3, "filtered rollouts", "reward")


def evaluate(recording: Recording, score: float, seed: int | None = 3) -> None:
    """Adds an evaluation before the first update; `seed`: that of a sample, None: no samples are recorded."""
    file = recording.folder / "run" / "metrics.jsonl"
    file.write_text(json.dumps({"step": 0, "eval/default_score_mean": score}) + "\n" + file.read_text())
    if seed is not None:
        recording.step(0, changed(0, 0, seed=seed), name="eval")


def test_samples_of_an_evaluation_come_before_their_scores(pair, capsys):
    """Before the first update no optimizer can be the cause."""
    a, b = pair
    evaluate(a, 0.25, seed=3)
    evaluate(b, 0.5, seed=4)
    assert command.bisect_runs(a.run.path, b.run.path) == 1
    out = capsys.readouterr().out
    assert "first difference: step 0, evaluation, seed" in out
    assert "meaning: the seeds of sampling differ" in out
    assert "optimizer" not in out
    assert "equal: no record\n" in out


def test_scores_of_an_evaluation_without_samples(pair):
    a, b = pair
    evaluate(a, 0.25, seed=None)
    evaluate(b, 0.5, seed=None)
    assert first(a, b) == (0, "metrics of the evaluation", "eval/default_score_mean")
    assert "optimizer" not in describe_cause(bisect(a.run, b.run).first)


def test_an_optimizer_is_blamed_only_after_the_first_update(pair):
    a, b = pair
    for step, blamed in ((1, False), (2, True)):
        rows = [{"step": n, "policy/loss": 0.5 + (n == step)} for n in (1, 2, 3)]
        (b.folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"step": n, "policy/loss": 0.5} for n in (1, 2, 3)]
        (a.folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = bisect(a.run, b.run).first
        assert (found.step, found.name) == (step, "metrics")
        assert ("optimizer" in describe_cause(found)) == blamed


def test_first_tensor_of_a_checkpoint(pair):
    a, b = pair
    for recording in pair:
        recording.checkpoint(1, body=1.0, head=0.5)
    a.checkpoint(2, body=1.0, head=0.5)
    b.checkpoint(2, body=1.0, head=0.75)
    b.metrics(grad_norm=1.5)
    assert first(a, b) == (2, "metrics", "grad_norm")
    later = bisect(a.run, b.run).later
    assert later is not None and (later.step, later.name) == (2, "checkpoint of the actor")
    assert [(c.quantity, c.largest) for c in later.differing] == [("model.head", 0.25)]
    assert later.differing[0].first == "element [0, 0]: 0.5 | 0.75"
    b.metrics()
    assert first(a, b) == (2, "checkpoint of the actor", "model.head")


def test_settings(tmp_path, capsys):
    a, b = Recording(tmp_path / "a"), Recording(tmp_path / "b", **{"train.seed": 7, "ds.zero_stage": 3})
    found = bisect(a.run, b.run).settings
    assert found.learned == {"--train.seed": (a.run.flags["train.seed"], 7)}
    assert "--ds.zero_stage" in found.other and "--ckpt.output_dir" in found.other
    b.step(1, changed(1, 0, seed=4))
    assert command.bisect_runs(a.run.path, b.run.path) == 1
    out = capsys.readouterr().out
    assert "--train.seed" in out and "first difference: step 1, rollouts, seed" in out
    assert re.search(r"quantity +differs in +largest +first difference", out)


def test_a_run_that_ended_early_is_equal_as_far_as_it_goes(pair):
    a, b = pair
    (b.folder / "run" / "rollouts" / "step_000003.parquet").unlink()
    result = bisect(a.run, b.run)
    assert result.first is None and not result.are_equal
    assert result.alone == {"rollouts of the first run": [3]}


def test_folders_that_are_no_runs_are_refused(tmp_path):
    recording = Recording(tmp_path / "a")
    (empty := tmp_path / "empty").mkdir()
    with refused(ErrorCode.NOT_FOUND, value=empty):
        command.bisect_runs(empty, recording.run.path)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text(to_yaml(SFT.config_type()))
    (tmp_path / "sft" / "argv.txt").write_text("python -m openrlhf.cli.train_sft\n")
    with refused(ErrorCode.CONFLICT, flag="RUN_B"):
        command.bisect_runs(recording.run.path, tmp_path / "sft")
