"""`openrlhf doctor RUN`: each cause is found in a run that has it, and a healthy run has none."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import pytest
from run_folders import sample, write_journal, write_run

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.lock import locked
from openrlhf.tools.command_line import installation
from openrlhf.tools.doctor import flags, stalls
from openrlhf.tools.doctor.diagnose import diagnose, examine_installation, examine_run
from openrlhf.tools.doctor.record import Finding, RunRecord, Series
from openrlhf.tools.doctor.rewards import CLEAR, LOST, _falls
from openrlhf.tools.doctor.stalls import Frame, Stack, doing, read_stacks, waiting
from openrlhf.tools.replay import flags as flags_of_replay
from openrlhf.tools.view import flags as flags_of_view

STEPS = 40
NOISE = np.random.default_rng(0).normal(size=STEPS) * 0.01
RISING = list(np.linspace(0.2, 0.8, STEPS) + NOISE)
HEALTHY = {
    "rollout/reward_mean": RISING,
    "rollout/reward_std": [0.4] * STEPS,
    "reward/zero_std_fraction": [0.3] * STEPS,
    "rollout/truncated_rate": [0.02] * STEPS,
    "rollout/duplicate_ratio": [0.1] * STEPS,
    "rollout/response_length_mean": list(100 + 100 * NOISE),
    "policy/entropy": list(np.linspace(0.9, 0.6, STEPS)),
    "mismatch/abs_diff_mean": list(5e-3 + 0.01 * abs(NOISE)),
    "timing/generate": list(5 + NOISE),
    "timing/update": list(3 + NOISE),
    "timing/step_total": list(8 + NOISE),
    "memory/update_gb": list(1 + 0.1 * NOISE),
    "eval/default_score_mean": [None if i % 10 else 0.3 + 0.01 * i for i in range(STEPS)],
}
ramp = lambda start, end: list(np.linspace(start, end, STEPS) + NOISE)

DEFECTS = {
    "flat-reward": {"rollout/reward_mean": [0.0] * STEPS, "rollout/reward_std": [0.0] * STEPS},
    "failed-samples": {"rollout/failed_ratio": [0.3] * STEPS},
    "reward-hacking": {
        "eval/default_score_mean": [None if i % 8 else 0.6 - 0.01 * i for i in range(STEPS)],
        "rollout/response_length_mean": ramp(100, 400),
        "rollout/length_reward_correlation": [0.8] * STEPS,
    },
    "entropy-collapse": {
        "policy/entropy": list(np.geomspace(1.0, 0.005, STEPS)),
        "rollout/reward_mean": list(0.4 + NOISE),
        "eval/default_score_mean": [None if i % 10 else 0.4 for i in range(STEPS)],
    },
    "truncation": {"rollout/truncated_rate": ramp(0.1, 0.9)},
    "gap": {"mismatch/abs_diff_mean": ramp(0.1, 0.3)},
    "slow-steps": {
        "timing/save": [60.0 if i in (20, 30) else 0.1 for i in range(STEPS)],
        "timing/step_total": [68.0 if i in (20, 30) else 8.1 for i in range(STEPS)],
    },
    "memory": {"memory/update_gb": ramp(1, 4)},
}


evaluated = lambda scores: [None if i % 5 else score for i, score in enumerate(scores)]
FORGETS = [*np.linspace(0.3, 0.7, 20), *np.linspace(0.7, 0.1, 20)]
DEFECTS |= {
    "degraded-policy": {
        "rollout/reward_mean": list(FORGETS + NOISE),
        "eval/default_score_mean": evaluated(FORGETS),
        "rollout/truncated_rate": [*[0.02] * 20, *np.linspace(0.02, 0.9, 20)],
    },
}

TITLES = {
    "memory": "memory of update grows",
    "slow-steps": "2 of 40 steps are slow: save takes the time",
}


def causes(run: Path) -> list[str]:
    return [finding.cause for finding in diagnose(RunRecord(run))]


def test_a_healthy_run_has_no_findings_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", HEALTHY)
    assert examine_run(run, as_data=False) == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).startswith(f"{run}: 40 rows of metrics, last step 40; not running ")
    assert "healthy" in out
    assert "\n   - rollout/reward_mean 0.2" in out


@pytest.mark.parametrize("steps", [8, 20, 60])
def test_few_courses_without_a_trend_count_as_degraded(steps: int) -> None:
    """Rewards near 0 vary most for their size: .05 and a standard deviation of .03."""
    rng, numbers = np.random.default_rng(0), np.arange(steps)
    courses = [Series("r", numbers, rng.normal(0.05, 0.03, steps).clip(0, 1)) for _ in range(200)]
    assert sum(_falls(course, LOST, 2 * CLEAR) for course in courses) <= 6
    lost = Series("r", numbers, np.where(numbers < steps // 2, 0.7, 0.1))
    assert _falls(lost, LOST, 2 * CLEAR)


def test_metrics_of_an_earlier_version_have_their_current_names(tmp_path: Path) -> None:
    """Values that are no finite numbers are left out."""
    rows = [
        {"step": 1, "timing/score": 2.5, "x": "NaN", "y": None},
        {"step": 2, "timing/logprobs": 3, "x": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunRecord(tmp_path)
    assert run.names("timing/") == ["timing/logprobs"]
    assert run.series("timing/logprobs").values.tolist() == [2.5, 3.0]
    assert run.series("x").steps.tolist() == [2]


SCATTERED = [*[0.2, 0.4, 0.25, 0.17, 0.3, 0.21, 0.26, 0.2]]
"""Scores of an evaluation with 30 prompts."""


@pytest.mark.parametrize(
    "change",
    [
        {"eval/default_score_mean": [s for score in SCATTERED for s in (score, *[None] * 4)]},
        {"mismatch/abs_diff_mean": ramp(0.05, 0.06), "rollout/staleness_max": [3] * STEPS},
        {"rollout/total_length_mean": ramp(100, 400), "memory/update_gb": ramp(1, 3)},
        {"rollout/reward_mean": list(FORGETS + NOISE), "eval/default_score_mean": evaluated(RISING)},
    ],
    ids=["few prompts", "stale samples", "longer samples", "harder prompts"],
)
def test_what_looks_like_a_problem_and_is_none(change: dict, tmp_path: Path) -> None:
    assert causes(write_run(tmp_path / "run", HEALTHY | change)) == []


def test_equal_rewards_name_the_side_on_which_they_are(tmp_path: Path) -> None:
    """The mean reward is slightly higher at the end in both runs."""
    for reward, remedy in ((0.004, "check --data.label_key"), (0.97, "use harder prompts")):
        flat = {"reward/zero_std_fraction": [0.97] * STEPS, "rollout/reward_max": [1.0] * STEPS}
        change = flat | {"rollout/reward_mean": ramp(reward, reward * 1.02), "eval/default_score_mean": []}
        run = write_run(tmp_path / str(reward), HEALTHY | change)
        assert found(run, "flat-reward").remedy.startswith(remedy)


def test_a_collapse_comes_before_the_equal_rewards_that_follow_it(tmp_path: Path) -> None:
    after = {"reward/zero_std_fraction": [0.3] * 20 + [0.97] * 20, "rollout/duplicate_ratio": [0.95] * STEPS}
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["entropy-collapse"] | after)
    text = "rollout/duplicate_ratio > 0.9 for 10 steps (last 0.95): the samples of a prompt repeat each other"
    (run / "health.jsonl").write_text(json.dumps({"step": 10, "text": text}) + "\n")
    assert causes(run) == ["entropy-collapse", "flat-reward"]


def test_the_loss_of_experts_may_rise(tmp_path: Path) -> None:
    losses = {"sft/loss": ramp(2, 1), "sft/balance_loss": ramp(1, 1.5)}
    assert causes(write_run(tmp_path / "run", losses)) == []


@pytest.mark.parametrize("cause", DEFECTS)
def test_each_cause_comes_first_in_a_run_that_has_it(cause: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS[cause])
    assert causes(run)[0] == cause
    assert found(run, cause).title == TITLES.get(cause, found(run, cause).title)


def found(run: Path, cause: str) -> Finding:
    return next(finding for finding in diagnose(RunRecord(run)) if finding.cause == cause)


def test_output_names_evidence_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["memory"])
    with pytest.raises(SystemExit) as stop:
        flags.doctor([str(run)])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "memory/update_gb" in out and "remedy: " in out and "healthy" not in out
    with pytest.raises(SystemExit):
        flags.doctor([str(run), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data.keys() == {"run", "last_step", "running", "healthy", "findings", "signs"}
    assert data["run"] == str(run) and not data["running"] and not data["healthy"]
    assert data["findings"][0]["cause"] == "memory"


def test_an_output_folder_means_its_newest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads runs takes one; a folder without runs is refused."""
    run = write_run(tmp_path / "policy" / "runs" / "a", HEALTHY | DEFECTS["memory"])
    with pytest.raises(SystemExit):
        flags.doctor([str(tmp_path / "policy"), "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == str(run)
    (tmp_path / "empty").mkdir()
    for command, words in (
        (flags.doctor, []),
        (flags_of_view.rollouts, []),
        (flags_of_view.watch, []),
        (flags_of_replay.replay, ["--step", "1"]),
        (flags_of_replay.bisect, [str(run)]),
    ):
        with pytest.raises(SystemExit):
            command([str(tmp_path / "empty"), *words])
        assert "is no run folder and has none inside" in capsys.readouterr().err


def test_rewards_that_miss_a_label_point_to_the_reward_function(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["flat-reward"])
    write_journal(run, STEPS, [sample([1, 2, 3], label='"42"', response="it is 42") for _ in range(4)])
    finding = found(run, "flat-reward")
    assert "--reward.remote_url" in finding.remedy
    assert any("100% of the answers" in text for text in finding.evidence)


def test_hacking_names_the_share_of_an_ngram(tmp_path: Path) -> None:
    changed = {"eval/default_score_mean": DEFECTS["reward-hacking"]["eval/default_score_mean"]}
    run = write_run(tmp_path / "run", HEALTHY | changed)
    random = np.random.default_rng(0)
    for step in range(1, 10):
        same = [7] * 9 if step > 5 else []
        rows = [
            sample([1, *random.integers(10, 90, 12), *same, *random.integers(10, 90, 6)]) for _ in range(8)
        ]
        write_journal(run, step, rows)
    finding = found(run, "reward-hacking")
    assert "n-gram share" in finding.title
    assert "eval/default_score_mean falls" in " ".join(finding.evidence)


CONVERGED = {
    "rollout/reward_mean": list(0.94 - 0.6 * np.exp(-np.arange(STEPS) / 8)),
    "rollout/reward_max": [1.0] * STEPS,
    "reward/zero_std_fraction": ramp(0.1, 0.97),
    "rollout/duplicate_ratio": ramp(0.1, 0.97),
    "policy/entropy": list(np.geomspace(1.0, 0.005, STEPS)),
}


@pytest.mark.parametrize("evaluated", [True, False], ids=["evaluated", "not evaluated"])
def test_a_policy_that_becomes_sure_while_it_succeeds_is_healthy(tmp_path: Path, evaluated: bool) -> None:
    """The warnings are those of a run whose release took success for a collapse."""
    scores = {"eval/default_score_mean": [0.32] + [None] * (STEPS - 2) + [0.92]} if evaluated else {}
    healthy = {name: v for name, v in HEALTHY.items() if not name.startswith("eval/")}
    run = write_run(tmp_path / "run", healthy | CONVERGED | scores)
    warnings = (
        "rollout/duplicate_ratio > 0.9 for 10 steps (last 0.97)",
        "policy/entropy < 0.02 for 20 steps",
    )
    rows = [{"step": 38, "text": text} for text in warnings]
    (run / "health.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert examine_run(run, as_data=False) == 0


@pytest.mark.parametrize("score", [0.92, 0.3], ids=["kept", "lost"])
def test_a_score_that_was_lost_again_is_no_success(tmp_path: Path, score: float) -> None:
    evaluations = {"eval/default_score_mean": [0.3] + [None] * 18 + [0.92] + [None] * (STEPS - 21) + [score]}
    run = write_run(tmp_path / "run", HEALTHY | CONVERGED | evaluations)
    assert ("entropy-collapse" in causes(run)) == (score == 0.3)


DESTROYED = {
    "rollout/reward_mean": [0.391, 0.0, 0.0],
    "rollout/reward_std": [0.488, 0.0, 0.0],
    "rollout/num_samples": [256] * 3,
    "reward/zero_std_fraction": [0.06, 1.0, 1.0],
    "rollout/truncated_rate": [0.0, 0.93, 0.93],
    "rollout/response_length_mean": [16.9, 46.2, 46.2],
    "policy/entropy": [0.7, 0.001, 0.001],
    "grad_norm": [0.344, 0.0, 0.0],
    "lr": [0.05] * 3,
}


def test_a_policy_that_one_update_destroyed_is_told_with_the_learning_rate_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", DESTROYED)
    assert causes(run) == ["destroyed-model"]
    finding = found(run, "destroyed-model")
    assert finding.evidence == ("step 2: reward 0.391 -> 0, cut answers 0% -> 93%",)
    assert finding.remedy.startswith("lower --actor.adam.lr first, tenfold or more (it was 0.05)")


@pytest.mark.parametrize(("last", "healthy"), [(9.2, False), (0.4, True)], ids=["lost", "recovered"])
def test_a_supervised_model_that_one_update_destroyed(tmp_path: Path, last: float, healthy: bool) -> None:
    losses = [3.46, 32.8, 17.8, 15.0, 12.3, 12.8, *np.linspace(last, last, 6)]
    run = write_run(tmp_path / "run", {"sft/loss": losses, "lr": [0.5] * 12})
    assert causes(run) == ([] if healthy else ["destroyed-model"])
    if not healthy:
        finding = found(run, "destroyed-model")
        assert finding.evidence == ("step 2: sft/loss 3.46 -> 32.8",)
        assert finding.remedy.startswith("lower --adam.lr first, tenfold or more (it was 0.5)")


def test_cut_answers_come_before_equal_rewards(tmp_path: Path) -> None:
    cut = {
        "rollout/reward_mean": [0.0] * 3,
        "rollout/reward_std": [0.0] * 3,
        "reward/zero_std_fraction": [1.0] * 3,
        "rollout/truncated_rate": [1.0] * 3,
        "rollout/response_length_mean": [4.0] * 3,
    }
    run = write_run(tmp_path / "run", cut)
    assert causes(run) == ["truncation"]
    assert found(run, "truncation").title == "truncation: answers run out of tokens"


def test_a_template_that_is_not_used_comes_first(tmp_path: Path) -> None:
    for name, change in (("flat", DEFECTS["flat-reward"]), ("learns", {})):
        run = write_run(tmp_path / name, HEALTHY | change)
        row = {"step": 1, "text": "the model's chat template is not used: M has one. Remedy: x"}
        (run / "health.jsonl").write_text(json.dumps(row) + "\n")
        assert causes(run) == ["missing-template", *(["flat-reward"] if change else [])]
        assert found(run, "missing-template").evidence == ("step 1: M has one",)


def test_three_steps_and_a_slow_machine_are_healthy(tmp_path: Path) -> None:
    """The times are those of a run of minutes: an evaluation takes longer than a step, the machine slows."""
    first = {name: values[:3] for name, values in HEALTHY.items()}
    assert causes(write_run(tmp_path / "three", first)) == []
    seconds = {
        "timing/generate": list(np.linspace(1, 3, 13)),
        "timing/evaluate": [2.5 if i % 3 == 0 else None for i in range(13)],
        "timing/step_total": [s + (2.5 if i % 3 == 0 else 0) for i, s in enumerate(np.linspace(1, 3, 13))],
    }
    slow = {name: values[:13] for name, values in HEALTHY.items() if not name.startswith("timing/")}
    assert causes(write_run(tmp_path / "slow", slow | seconds)) == []


def test_a_run_that_only_takes_long_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps take 59.9 s more than the median of 8.1 s, in a run of 444 s."""
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["slow-steps"])
    assert examine_run(run, as_data=False) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.index("healthy: no problem was found, but it could be faster") < out.index("1. 2 of 40 steps")
    assert "together 120 s (27% of the run) more" in out and "save accounts for 120 s of that" in out
    assert "steps 21, 31" in out and "--ckpt.async_save" in out
    assert examine_run(run, as_data=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["healthy"] and [finding["cause"] for finding in data["findings"]] == ["slow-steps"]


@pytest.mark.parametrize("longer", [False, True])
def test_a_phase_that_becomes_slower_is_named(tmp_path: Path, longer: bool) -> None:
    lengths = {"rollout/response_length_mean": ramp(100, 400 if longer else 100)}
    seconds = {"timing/generate": ramp(5, 40), "timing/step_total": ramp(8, 43)}
    finding = found(write_run(tmp_path / "run", HEALTHY | lengths | seconds), "slow-steps")
    assert finding.title == f"generate becomes slower{', with longer answers' * longer}"


def test_a_rare_phase_takes_all_its_time_from_a_usual_step(tmp_path: Path) -> None:
    """Two of 40 steps save, for 60 s each; no usual step saves."""
    seconds = {"timing/save": [60.0 if i in (20, 30) else None for i in range(STEPS)]}
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["slow-steps"] | seconds)
    assert found(run, "slow-steps").evidence[1] == "save accounts for 120 s of that"


def test_slowness_comes_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY | DEFECTS["slow-steps"] | {"memory/update_gb": ramp(1, 4)})
    assert causes(run) == ["memory", "slow-steps"]


def test_entropy_is_estimated_from_rollouts(tmp_path: Path) -> None:
    plateau = HEALTHY | DEFECTS["entropy-collapse"]
    run = write_run(tmp_path / "run", {name: v for name, v in plateau.items() if "entropy" not in name})
    for step in (1, 20, 40):
        write_journal(run, step, [sample([1, 2, 3], rollout_log_probs=[-1.0 / step**2] * 2)])
    assert found(run, "entropy-collapse").score > 0.6


def test_a_warning_that_nothing_explains_is_repeated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY | {"kl/mean": [2.0] * STEPS})
    text = "kl/mean > 1 for 5 steps (last 2): the policy has left the reference"
    (run / "health.jsonl").write_text(json.dumps({"step": 5, "text": text}) + "\n")
    finding = found(run, "unhealthy")
    assert "kl/mean is unhealthy" in finding.title
    assert "--algo.kl.init_coef" in finding.remedy


def test_a_warning_is_left_out_only_if_another_cause_explains_it(tmp_path: Path) -> None:
    text = "rollout/truncated_rate > 0.5 for 10 steps (last 0.9): most answers run out of tokens"
    for name, change in (("lasting", DEFECTS["truncation"]), ("over", {})):
        run = write_run(tmp_path / name, HEALTHY | change)
        (run / "health.jsonl").write_text(json.dumps({"step": 5, "text": text}) + "\n")
    assert causes(tmp_path / "lasting") == ["truncation"]
    assert causes(tmp_path / "over") == ["unhealthy"]


@pytest.mark.parametrize(
    ("flags_of_run", "raised"),
    [
        (
            {"reward__stop_properly_penalty_coef": 0.5},
            "1 of 2 samples are truncated and have negative rewards; -2",
        ),
        (
            {"tasks__a__stop_properly_penalty_coef": 0.0},
            "1 of 2 samples are truncated and have negative rewards; -2",
        ),
        ({"reward__stop_properly_penalty_coef": -1.0}, ""),
        ({"reward__stop_properly_penalty_coef": 1.0}, ""),
        ({}, ""),
    ],
)
def test_a_penalty_that_raises_rewards_is_found(tmp_path: Path, flags_of_run: dict, raised: str) -> None:
    run = write_run(tmp_path / "run", HEALTHY, **flags_of_run)
    rows = [sample([1, 2], reward=r, truncated=r < 0, source="a", outcome="ok") for r in (-2.0, 1.0)]
    write_journal(run, STEPS, rows)
    told = [finding for finding in diagnose(RunRecord(run)) if finding.cause == "raised-rewards"]
    assert [raised in told.evidence[0] for told in told] == [True] * bool(raised)


def test_the_rank_with_most_tokens_is_late(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY)
    rows = [sample([1] * (30 if rank else 10), ranks=[rank], optimizer_steps=[1]) for rank in (0, 0, 0, 1)]
    rows.append(sample([1] * 100, ranks=[1], optimizer_steps=[1]))
    write_journal(run, STEPS, rows)
    assert "rank 1" in found(run, "late-rank").title


STACKS = """\
== the driver
thread MainThread:
  File "/x/openrlhf/cluster/pending.py", line 20, in result
    pass

== rank 0 of policy
thread MainThread:
  File "/x/openrlhf/training/worker.py", line 300, in update
    pass
  File "/y/torch/distributed/distributed_c10d.py", line 3000, in all_reduce
    pass
thread pulse:
  File "/x/openrlhf/cluster/watchdog.py", line 60, in _beat
    pass

== rank 1 of policy
thread MainThread:
  File "/x/openrlhf/training/worker.py", line 200, in forward
    pass

== engine 0
it does not answer"""


def test_stacks_tell_who_waits_for_whom(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY)
    with living(run):
        (run / "report.html").touch()
    (run / "stacks.txt").write_text(STACKS)
    driver, first, second, engine = read_stacks(run / "stacks.txt")
    assert doing(driver) == "waits for calls to other processes, in result (cluster/pending.py:20)"
    assert "all_reduce" in doing(first)
    assert doing(second) == "is in forward (training/worker.py:200)"
    assert doing(engine) == "does not answer"
    assert next(waiting([driver, first, second])) == (
        "rank 0 of policy waits in all_reduce for rank 1 of policy"
    )
    assert causes(run)[0] == "stall"
    past = time.time() - 30
    os.utime(run / "stacks.txt", (past, past))  # of an earlier start, which a later one has resumed
    assert causes(run) == []


def test_a_run_that_was_killed_after_a_resume_is_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY)
    with living(run):
        pass
    (run / "report.html").touch()
    assert causes(run) == []
    past = time.time() - 30
    os.utime(run / "report.html", (past, past))
    assert causes(run) == ["killed"]


def test_a_reward_is_recognised_in_a_stack() -> None:
    stack = Stack(
        "engine 0", (Frame("sleep", "time.py", 1), Frame("score", "/x/openrlhf/rewards/function.py", 5))
    )
    assert doing(stack).startswith("computes or awaits rewards")


@contextmanager
def living(run: Path) -> Iterator[int]:
    """Starts a process that holds the lock of the folder, as its owner says."""
    program = "import time\ndef wait_for_reward():\n    time.sleep(60)\nwait_for_reward()"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            now = datetime.now(UTC)
            owner = f"process {process.pid} on {platform.node()}, since {now:%Y-%m-%d %H:%M:%S} UTC\n"
            (run / ".lock").write_text(owner)
            time.sleep(0.5)
            yield process.pid
        finally:
            process.kill()


def test_the_owner_of_a_lock_is_read_as_the_lock_writes_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEALTHY)
    with locked(run, flag="--logger.run_dir"):
        process = RunRecord(run).process
    assert process is not None and process.pid == os.getpid()


def test_a_run_that_stands_still_shows_the_stack_of_its_process(tmp_path: Path, monkeypatch) -> None:
    """A resumed run that still loads its models stands not still, although its last row is old."""
    run = write_run(tmp_path / "run", HEALTHY)
    an_hour_ago, now = time.time() - 3600, time.time
    os.utime(run / "metrics.jsonl", (an_hour_ago, an_hour_ago))
    with living(run) as pid:
        assert causes(run) == []
        monkeypatch.setattr(stalls.time, "time", lambda: now() + 3600)
        finding = found(run, "stall")
    text = " ".join(finding.evidence)
    assert "since step 40" in text
    assert f"process {pid}" in text
    assert "wait_for_reward" in text
    assert causes(run) == ["killed"]


def test_the_installation_is_listed_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "mismatches", lambda: iter(()))
    monkeypatch.setattr(installation, "LEAST_SHARED", 0)
    assert examine_installation(as_data=False) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    old = UsageError(ErrorCode.MISSING_PACKAGE, "version 1 is installed\npip install 'ray==2'", value="ray")
    monkeypatch.setattr(installation, "mismatches", lambda: iter([old]))
    monkeypatch.setattr(installation, "LEAST_SHARED", 2**60)
    assert examine_installation(as_data=False) == 1
    out = capsys.readouterr().out
    assert "pip install 'ray==2'" in out
    assert "--shm-size" in out
    assert examine_installation(as_data=True) == 1
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert [fact["name"] for fact in facts if fact["problem"]] == ["ray", "/dev/shm"]
    assert [fact["name"] for fact in facts] == [
        *("python", "packages", "ray", "vllm", "deepspeed", "GPUs", "machine", "C compiler"),
        *("/dev/shm", "cache", "address"),
    ]
    (ray, shared) = (fact for fact in facts if fact["problem"])
    assert (ray["problem"], ray["remedy"]) == ("version 1 is installed", "pip install 'ray==2'")
    assert shared["problem"].endswith("need 1.07374e+09 GiB")
    assert re.fullmatch(rf"{platform.node()} is \d+(\.\d+){{3}}, with free ports", facts[-1]["found"])


def test_supervised_loss_that_rises(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"sft/loss": ramp(1, 3)})
    assert causes(run) == ["loss-rises"]
    assert found(run, "loss-rises").title == "sft/loss rises"
    run = write_run(tmp_path / "held_out", {"eval/sft/loss": ramp(1, 3)})
    assert found(run, "loss-rises").title == "eval/sft/loss rises on held-out data: the model overfits"


def test_a_process_whose_stack_cannot_be_read_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="Error: no access\nPermission denied\n")

    monkeypatch.setattr(stalls.shutil, "which", lambda name, path=None: "py-spy")
    monkeypatch.setattr(stalls.subprocess, "run", fail)
    stack = stalls._dump(psutil.Process(), is_driver=True)
    assert stack == Stack(f"the driver (process {os.getpid()}): Permission denied", ())
    monkeypatch.setattr(stalls.psutil, "pid_exists", lambda pid: False)
    assert stalls._dump(psutil.Process(), is_driver=True) is None


def test_a_process_whose_stack_cannot_be_read_in_time_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(stalls.shutil, "which", lambda name, path=None: "py-spy")
    monkeypatch.setattr(stalls.subprocess, "run", hang)
    stack = stalls._dump(psutil.Process(), is_driver=True)
    assert stack == Stack(f"the driver (process {os.getpid()})", ())


def test_a_report_has_no_secrets_paths_or_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", DEFECTS["flat-reward"])
    (run / "config.yaml").write_text(
        "actor: {model_name_or_path: /home/alice/models/Qwen3}\nlogger: {wandb: {key: wandb-1234}}\n"
        "reward: {remote_url: 'http://bob:word@judge:5000/get/reward'}\n"
    )
    (run / "argv.txt").write_text(
        "openrlhf ppo --config /home/alice/run.yaml --logger.wandb.key=wandb-1234\n"
    )
    monkeypatch.setattr(installation, "facts", lambda: iter(()))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("OPENRLHF_CACHE", "/home/alice/cache/openrlhf")
    monkeypatch.setenv("NCCL_COMM_ID", f"{platform.node()}:29500")
    with pytest.raises(SystemExit) as stop:
        flags.doctor([str(run), "--report"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    hidden = ("alice", "wandb-1234", "hf_abcdefgh", "bob:word", str(tmp_path), platform.node())
    assert not [text for text in hidden if text in out]
    assert "openrlhf ppo --config <path>/run.yaml" in out
    assert "model_name_or_path: <path>/Qwen3" in out and "judge:5000/get/reward" in out
    assert "variable OPENRLHF_CACHE: <path>/openrlhf" in out and "NCCL_COMM_ID: <host>:29500" in out
    assert "version torch: " in out and "same reward" in out
