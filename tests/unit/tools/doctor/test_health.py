import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from records import record_of, trajectory

from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import LoggerConfig
from openrlhf.observability.observer import Observer
from openrlhf.observability.rollout_metrics import rollout_metrics
from openrlhf.observability.run_folder import RunFolder, read_jsonl
from openrlhf.tools.doctor.health import Health
from openrlhf.tools.doctor.symptoms import RULES, Rule

PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
HIGH = Rule(metric="loss", sign=">", limit=2, steps=3, text="too high. Lower it.")
LOW = Rule(metric="kl", sign="<", limit=0, steps=1, text="too low. Raise it.")


def spoken(values, rules=(HIGH,), metric="loss"):
    """Returns the numbers of the steps with a warning; None is a step without the metric."""
    health = Health(rules=rules)
    rows = [{} if value is None else {metric: value} for value in values]
    return [step for step, metrics in enumerate(rows) if health.check(metrics)]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([3, 3], []),
        ([3, 3, 3], [2]),
        ([3, 3, 3, 3, 3, 3, 3], [2]),
        ([3, 3, 2, 3, 3, 3], [5]),
        ([3, 3, 3, 2, 3, 3, 3], [2, 6]),
        ([3, None, 3, None, None, 3], [5]),
        ([3, 3, math.nan, 3], [3]),
        ([math.inf] * 3, [2]),
        ([2, 2, 2], []),
        ([], []),
    ],
)
def test_a_rule_speaks_once_when_its_condition_has_held_long_enough(values, steps):
    assert spoken(values) == steps


def rewards_of(*steps, **more):
    """Returns the beginnings of lines about rewards, in the run and at its end; `steps`: lists of rewards."""
    health, lines = Health(), []
    for rewards in steps:
        rollout = rollout_metrics([trajectory(r, sample_index=i) for i, r in enumerate(rewards)], 0)
        lines += health.check(rollout | more)
    return [line.partition(":")[0] for line in lines], [line.partition(":")[0] for line in health.at_end()]


@pytest.mark.parametrize(
    ("steps", "first", "end"),
    [
        ([[0, 0]], ["all rewards of the step are 0"], []),
        (
            [[0.1] * 3, [0.1] * 7],
            ["all rewards of the step are 0.1"],
            ["all rewards of these 2 steps are 0.1"],
        ),
        ([[0, 0], [None, 0, 0], [0, 1]], ["all rewards of the step are 0"], []),
        ([[0, 0], [1, 1]], ["all rewards of the step are 0"], []),
        ([[0, 1], [1, 1], [1, 1]], [], []),
        ([[None, None], [1, 1]], ["all rewards of the step are 1"], []),
        ([[1], [1]], [], []),
    ],
)
def test_rewards_that_are_all_one_number_are_told_after_the_first_step_and_at_the_end(steps, first, end):
    assert rewards_of(*steps) == (first, end)


def test_rewards_beside_a_teacher_may_be_one_number():
    assert rewards_of([0, 0], [0, 0], **{"teacher/kl_mean": 0.5}) == ([], [])


def test_a_run_whose_rewards_never_differ_ends_with_the_likely_cause(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, LoggerConfig())
    observer.start(3)
    for step in (1, 2, 3):
        same = {"rollout/reward_std": 0.0, "rollout/reward_mean": 0.0, "rollout/num_samples": 4.0}
        observer.log_step(step, same | {"reward/zero_std_fraction": 0.75})
    observer.close()
    lines = capsys.readouterr().out.splitlines()
    assert "step 1/3  reward 0  uniform 0.75" in lines[0]
    assert "uniform: " in lines[1]
    assert "3 steps" in lines[-1]
    for line in (lines[2], lines[-1]):
        assert line.index("reward function") < line.index("label") < line.index("prompts")
    assert [row["step"] for row in read_jsonl(folder.health_path)] == [1, 3]


def test_damaged_files_of_earlier_steps_end_no_run(tmp_path, caplog):
    """The report is written before a supervised run saves its model."""
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, LoggerConfig())
    observer.start(1)
    observer.log_step(1, {"loss": 1.0})
    (folder.rollouts_path / "step_000001.parquet").write_bytes(b"PAR1")
    observer.close()
    assert f"{tmp_path}: report was not made" in caplog.text and "arquet" in caplog.text


def told(*rows, missing_template=""):
    """Returns the beginning of each message of each row."""
    health = Health(missing_template=missing_template)
    return [[line.partition(":")[0] for line in health.check(row)] for row in rows]


def step_of(reward, cut, *, std=0.4, samples=256, lr=0.05):
    names = ("reward_mean", "truncated_rate", "reward_std", "num_samples")
    values = zip(names, (reward, cut, std, samples), strict=True)
    return {f"rollout/{name}": value for name, value in values} | {"lr": lr}


LOST = "an update has destroyed the policy"
CUT = "truncation"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([step_of(0.39, 0), step_of(0, 0.86, std=0), step_of(0, 1, std=0)], [[], [LOST], []]),
        ([step_of(0.39, 0), step_of(0, 0, std=0)], [[], [LOST]]),
        ([step_of(0.39, 0), step_of(0.3, 0.1), step_of(0.01, 0.9)], [[], [], [LOST]]),
        ([step_of(0, 0.1, std=0.1), step_of(0, 0.95, std=0)], [[], [LOST]]),
        ([step_of(0.25, 0, samples=4), step_of(0, 0, std=0, samples=4)], [[], []]),
        ([step_of(0.39, 0), step_of(0.2, 0.1)], [[], []]),
        ([step_of(0.39, 0), step_of(0.5, 0.6)], [[], []]),
        ([step_of(0, 1, std=0)], [[CUT]]),
        ([step_of(0, 0.85), step_of(0, 0.95), step_of(0, 1)], [[], [CUT], []]),
        ([step_of(0, 0, std=0)], [["all rewards of the step are 0"]]),
    ],
)
def test_a_destroyed_policy_and_cut_answers_are_told_once_in_their_step(rows, expected):
    assert told(*rows) == expected


def test_a_destroyed_policy_is_told_with_the_learning_rate_of_its_update():
    health = Health()
    health.check(step_of(0.391, 0, lr=0.05))
    (line,) = health.check(step_of(0, 0.932, std=0, lr=0.04))
    assert line == (
        "an update has destroyed the policy: reward 0.391 -> 0, cut answers 0% -> 93%. Remedy: lower "
        "--actor.adam.lr first, tenfold or more (it was 0.05), and start again from before it"
    )
    assert health.at_end() == []


@pytest.mark.parametrize(
    ("losses", "step"),
    [([7.3, 20.1, 10.7], 1), ([0.69, 0.7, 0.6, 3.6], 3), ([2.0, 2.6, 1.4, 3.0], None), ([0.5, 2.1], None)],
)
def test_a_model_that_a_supervised_update_destroyed_is_told(losses, step):
    lines = told(*({"sft/loss": loss, "lr": 0.5} for loss in losses))
    assert lines == [["an update has destroyed the model"] if i == step else [] for i in range(len(losses))]


def test_a_destroyed_model_is_told_with_the_learning_rate_of_its_update():
    health = Health()
    health.check({"sft/loss": 3.46, "lr": 0.5})
    (line,) = health.check({"sft/loss": 32.8, "lr": 0.48})
    assert "sft/loss 3.46 -> 32.8. Remedy: lower --adam.lr first, tenfold or more (it was 0.5)" in line


def test_a_missing_template_comes_before_its_consequences():
    rows = [step_of(0, 0.95, std=0)] * 3
    template = "the model's chat template is not used"
    assert told(*rows, missing_template="it has one")[:2] == [
        [template, "all rewards of the step are 0"],
        [CUT],
    ]


def test_metrics_of_a_sure_policy_are_unhealthy_only_without_success():
    sure = {"rollout/duplicate_ratio": 0.95, "policy/entropy": 0.01, "rollout/reward_max": 1.0}
    for means, fires in ((range(30), False), ([28.5] * 30, False), ([12] * 30, True)):
        health = Health()
        lines = [line for m in means for line in health.check(sure | {"rollout/reward_mean": m / 30})]
        assert [line.partition(" ")[0] for line in lines] == (
            ["rollout/duplicate_ratio", "policy/entropy"] if fires else []
        )


@pytest.mark.parametrize(
    ("metric", "value", "beside"),
    [
        ("reward/zero_std_fraction", 1.0, {"teacher/kl_mean": 0.4}),
        ("mismatch/abs_diff_mean", 0.08, {"rollout/staleness_max": 2}),
        ("grad_norm", 0.0, {"rollout/reward_mean": 0.99, "rollout/reward_max": 1.0}),
    ],
)
def test_a_condition_may_have_a_harmless_reason(metric, value, beside):
    for more, fires in (({}, True), (beside, False)):
        health = Health()
        health.check(more)
        assert any(health.check({metric: value} | more) for _ in range(25)) == fires


def test_a_rule_may_have_a_lower_limit():
    assert spoken([0, -1, -1, 0, -1], (LOW,), "kl") == [1, 4]


def test_the_line_says_what_it_means_and_what_to_do():
    health = Health(rules=(HIGH, LOW))
    assert health.check({"loss": 3.0, "kl": -0.5}) == ["kl < 0 for 1 step (last -0.5): too low. Raise it."]
    assert health.check({"loss": 3.0}) == []
    assert health.check({"loss": 2.345678}) == ["loss > 2 for 3 steps (last 2.35): too high. Lower it."]


def flags_of(config, prefix="--") -> set[str]:
    return {
        flag
        for f in fields(config)
        for value in [getattr(config, f.name)]
        for flag in (flags_of(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name})
    }


@pytest.mark.parametrize("rule", RULES, ids=[rule.condition for rule in RULES])
def test_every_rule_can_speak_names_flags_that_exist_and_is_documented(rule):
    worse = rule.limit + {">": 1, "<": -1, "=": 0}[rule.sign]
    health = Health()
    lines = [health.check({rule.metric: worse}) for _ in range(rule.steps)]
    assert lines[:-1] == [[]] * (rule.steps - 1)
    assert [line for line in lines[-1] if line.startswith(rule.metric) and line.endswith(rule.text)]
    named = re.findall(r"--[\w.]*\w", rule.text)
    assert set(named) <= flags_of(PPOConfig())
    assert f"| `{rule.metric}` {rule.condition.removeprefix(rule.metric).strip()} | {rule.text} |" in PAGE
    assert f"`{rule.metric}`" in PAGE.partition("## Health warnings")[0]


def test_no_condition_has_two_rules_and_the_page_has_no_others():
    table = PAGE.partition("## Health warnings")[2]
    assert re.findall(r"^\| `(.*?)`", table, re.MULTILINE) == [rule.metric for rule in RULES]
    assert len({(rule.metric, rule.sign) for rule in RULES}) == len(RULES)


def test_a_rule_may_be_about_one_value():
    assert spoken([0.0, 0.0, 1e-30, 0.0], (Rule.of("loss = 0 for 1 step", "none"),)) == [0, 3]


def observe(path, values, resume_step=None, decode=None) -> Observer:
    folder = RunFolder.create(path, config_yaml="{}", argv=["test"], resume=resume_step is not None)
    observer = Observer(folder, LoggerConfig(), resume_step=resume_step, decode=decode)
    observer.start(10, done=resume_step or 0)
    for step, value in enumerate(values, start=(resume_step or 0) + 1):
        observer.log_step(step, {"eval/failed_ratio": value})
    return observer


def test_what_looks_unhealthy_is_printed_kept_and_shown(tmp_path, capsys):
    observe(tmp_path, [0.5, 0.0, 0.25]).close()
    lines = capsys.readouterr().out.splitlines()
    said = [line.partition("unhealthy: ")[2] for line in lines if "unhealthy" in line]
    assert [line[:45] for line in said] == [
        "eval/failed_ratio > 0.1 for 1 step (last 0.5)",
        "eval/failed_ratio > 0.1 for 1 step (last 0.25)"[:45],
    ]
    rows = list(read_jsonl(tmp_path / "health.jsonl"))
    assert [row["step"] for row in rows] == [1, 3] and [row["text"] for row in rows] == said
    report = (tmp_path / "report.html").read_text()
    assert "Health warnings" in report and "(last 0.25)" in report


def test_a_healthy_run_says_nothing(tmp_path, capsys):
    observe(tmp_path, [0.0, 0.1]).close()
    assert "unhealthy" not in capsys.readouterr().out
    assert not (tmp_path / "health.jsonl").exists()
    assert "Health warnings" not in (tmp_path / "report.html").read_text()


def test_a_resumed_run_forgets_what_was_said_after_its_checkpoint(tmp_path):
    observe(tmp_path, [0.5, 0.0, 0.25]).close()
    observe(tmp_path, [0.0, 0.0, 0.75], resume_step=2).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "health.jsonl")] == [1, 5]


def test_another_run_in_the_same_folder_begins_with_nothing_said(tmp_path):
    observe(tmp_path, [0.5]).close()
    observe(tmp_path, [0.0]).close()
    assert not (tmp_path / "health.jsonl").exists()
    assert (tmp_path / "previous" / "001" / "health.jsonl").exists()


@pytest.mark.parametrize("names", [("step",), ("step", "eval", "step")])
def test_a_run_ends_with_a_few_samples_of_its_last_evaluation(tmp_path, capsys, names):
    observer = observe(tmp_path, [], decode=lambda ids, after: f"says {ids} after {after}")
    for step, name in enumerate(names):
        rollout = [trajectory(float(i), text=f"{name} asks") for i in range(20)]
        record_of(observer).write(step, rollout, name=name)
    observer.close()
    text = capsys.readouterr().out
    shown = "eval" if "eval" in names else "step"
    assert re.findall(r"prompt: (.*)", text) == [f"{shown} asks"] * 4
    assert (
        re.findall(r"--- reward (\d+)", text) == ["19", "13", "7", "0"]
        and "answer: says [2] after [1]" in text
    )


def test_long_supervised_runs_keep_few_rows_and_still_find_a_destroyed_model():
    health = Health()
    for step in range(1000):
        assert health.check({"sft/loss": 2.0, "lr": step, "throughput/tokens": 1.0}) == []
    assert len(health.rows) <= 11 and all(row.keys() == {"sft/loss", "lr"} for row in health.rows)
    (line,) = health.check({"sft/loss": 9.0, "lr": 0.0})
    assert "sft/loss 2 -> 9" in line and "(it was 1e+03)" in line
