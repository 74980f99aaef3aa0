import io
import json
import math
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.observability.journal import Journal
from openrlhf.observability.run_folder import RunFolder, to_json
from openrlhf.observability.selection import thinned
from openrlhf.observability.trackers.metrics_file import JsonlTracker
from openrlhf.tools.record.rollouts import few_samples, print_samples
from openrlhf.tools.view import report
from openrlhf.tools.view.curves import is_noisy, running_mean
from openrlhf.tools.view.report import CURVE_POINTS, _ticks, write_report
from openrlhf.types import Outcome, Prompt, Trajectory, runs

HOSTILE = "\x1b[2J\x9b<script>alert(1)</script><img src=x onerror=alert(2)>\"'&[bold]\ud800"


def trajectory(reward, prompt="What is 2+2?", **changes):
    return Trajectory(
        prompt=Prompt(prompt_id=0, text=prompt, label="4"),
        sample_index=0,
        token_ids=np.array([1, 2, 3, 4], np.int32),
        action_mask=np.array([False, False, True, True]),
        rollout_log_probs=np.array([-0.5, -0.5], np.float32),
        weight_versions=runs([0, 0]),
        reward=reward,
        **changes,
    )


FAILED = trajectory(None, outcome=Outcome.ENV_ERROR, error=HOSTILE)


def write_journal(rollouts, step, trajectories, *, decode=None):
    journal = Journal(rollouts, decode=decode)
    journal.write(step, trajectories)
    journal.close()


def make_run(path, num_steps=3, metrics=lambda step: {"rollout/reward_mean": step / 10}, config="a: 1\n"):
    folder = RunFolder.create(path, config_yaml=config, argv=["openrlhf", "train"], resume=False)
    tracker = JsonlTracker(folder.metrics_path)
    for step in range(1, num_steps + 1):
        tracker.log(step, metrics(step))
    tracker.close()
    return folder


class Page(HTMLParser):
    """Parser of a page that records tags with attributes and the text, and checks that every opened tag is
    closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += "" if data.isspace() else data

    def named(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def test_an_installed_package_has_the_template():
    root = Path(__file__).parents[4]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    others = {path for path in (root / "openrlhf").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert {path for pattern in listed["openrlhf"] for path in (root / "openrlhf").glob(pattern)} == others
    assert resources.files("openrlhf.tools.view").joinpath("report.html.j2").is_file()


def test_a_report_shows_the_run(tmp_path):
    folder = make_run(
        tmp_path / "my-run",
        num_steps=4,
        metrics=lambda step: {
            "rollout/reward_mean": step / 10,
            "eval/gsm8k_pass1": 0.625,
            "actor/kl": math.nan if step == 2 else 0.125,
            "timing/generate": 3.0,
            "memory/generate_gb": 1.25 * step,
            "timing/step_total": 4.0,
        },
        config="actor: {model_name_or_path: tiny}\n",
    )
    decode = lambda ids, after: f"answer of {len(ids)} tokens"
    write_journal(folder.rollouts_path, 1, [trajectory(0.25), trajectory(0.75), FAILED], decode=decode)
    write_journal(folder.rollouts_path, 2, [trajectory(0.333)], decode=decode)
    write_journal(folder.rollouts_path, 4, [trajectory(1.0, truncated=True)], decode=decode)
    path = write_report(folder.path)
    assert path == folder.path / "report.html"
    page = Page(path.read_text())
    for expected in (
        "my-run", "4 steps · 1 to 4", "step time 16s", "gsm8k pass1", "0.625", "1 not finite", "75 %",
        "5.0 GB", "step 3: 0.3", "answer of 2 tokens", "best · reward 0.75", "worst · reward 0.25",
        "failed · 2 tokens", "best · reward 1 · 2 tokens · cut off", "ok 2, env_error 1",
        "model_name_or_path: tiny", "openrlhf train",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert "0.333" not in page.text
    assert len(page.named("svg")) == 2
    assert "eval/gsm8k_pass1 0.625" in page.text


def test_a_report_says_that_it_shows_a_few_of_many_samples(tmp_path):
    folder = make_run(tmp_path)
    journal = Journal(folder.rollouts_path, mode="sample")
    journal.write(1, [trajectory(0.5)] * 100 + [FAILED])
    journal.close()
    assert "16, env_error 1 of 101" in Page(write_report(folder.path).read_text()).text


def test_a_curve_is_where_its_numbers_are(tmp_path):
    folder = make_run(tmp_path, num_steps=3, metrics=lambda step: {"loss": {1: 0.0, 2: 1.0, 3: 0.5}[step]})
    page = Page(write_report(folder.path).read_text())
    (line,) = page.named("polyline")
    points = [tuple(map(float, point.split(","))) for point in line["points"].split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2) and x1 < x2
    assert y2 < y3 < y1 and y3 == pytest.approx((y1 + y2) / 2)


def test_what_looked_unhealthy_is_shown_newest_last(tmp_path):
    folder = make_run(tmp_path)
    assert "Health warnings" not in Page(write_report(folder.path).read_text()).text
    rows = [{"step": step, "text": f"metric {step} {HOSTILE}"} for step in range(1, 31)]
    folder.health_path.write_text("".join(to_json(row) + "\n" for row in rows))
    page = Page(write_report(folder.path).read_text())
    assert "Health warnings10 earlier" in page.text and folder.health_path.name in page.text
    assert re.findall(r"step (\d+) metric (\d+)", page.text) == [(str(i), str(i)) for i in range(11, 31)]
    assert not {"script", "img"} & {tag for tag, _ in page.tags}


def test_the_figures_of_many_evaluation_sets_leave_room_for_training(tmp_path):
    sources, kinds = ["math", "code"], ["pass1", "pass16", "num_samples", "response_length_mean"]
    names = [f"eval/{source}_{kind}" for kind in kinds for source in sources] + ["rollout/reward_mean"]
    folder = make_run(tmp_path, metrics=lambda step: {name: step + i for i, name in enumerate(names)})
    page = Page(write_report(folder.path).read_text())
    drawn = [svg["aria-label"] for svg in page.named("svg")]
    assert drawn[:5] == [f"eval/{s}_{kind}" for kind in kinds[:2] for s in sources] + ["rollout/reward_mean"]
    tiles = [attrs for attrs in page.named("div") if attrs.get("class") == "tile"]
    assert len(tiles) == 3  # pass1 of both, and the reward


RL_METRICS = (
    *("rollout/reward_mean", "rollout/score_mean", "rollout/response_length_mean", "rollout/truncated_rate"),
    *("kl/mean", "mismatch/kl", "policy/loss", "policy/kl_loss", "policy/entropy", "critic/loss"),
)


@pytest.mark.parametrize(
    ("metrics", "tiles"),
    [
        (
            (*RL_METRICS, "eval/math_score_mean", "eval/math_best_of4", "eval/code_score_mean"),
            [
                *("eval math score mean", "eval code score mean", "rollout reward mean"),
                *("rollout score mean", "rollout response length mean", "kl mean", "policy entropy"),
            ],
        ),
        (("sft/loss", "eval/sft/loss", "grad_norm", "lr"), ["eval/sft loss", "sft loss"]),
        (
            ("dpo/loss", "dpo/accuracy", "eval/dpo/loss", "eval/dpo/accuracy", "lr"),
            ["eval/dpo accuracy", "eval/dpo loss", "dpo accuracy", "dpo loss"],
        ),
    ],
)
def test_the_headline_is_what_people_look_at(tmp_path, metrics, tiles):
    values = lambda step: {name: step + i / 10 for i, name in enumerate(metrics)}
    html = write_report(make_run(tmp_path, metrics=values).path).read_text()
    shown = re.findall(r'<div class="tile"><span class="name"><i>(.*?)</i> (.*?)</span>', html)
    assert [" ".join(name) for name in shown] == tiles


def test_what_says_the_same_twice_is_shown_once(tmp_path):
    """The mean of verdicts is pass@1, a score is the reward if a function returns no other, and so is a mean
    of float32."""
    scores, verdicts = (
        ("rollout/reward_mean", "rollout/score_mean"),
        ("eval/math_pass1", "eval/math_score_mean"),
    )
    values = lambda step: (
        dict.fromkeys(scores, step / 10)
        | {"reward/mean": float(np.float32(step / 10)), "kl/mean": math.nan if step == 2 else step}
        | dict.fromkeys(verdicts, step / 20)
        | {"kl/log_ratio_mean": math.nan if step == 2 else step, "policy/loss": 0.5, "policy/kl_loss": 0.5}
    )
    page = Page(write_report(make_run(tmp_path, metrics=values).path).read_text())
    assert [svg["aria-label"] for svg in page.named("svg")] == [verdicts[0], scores[0], "kl/mean"]
    equal = (*((twin, scores[0]) for twin in (scores[1], "reward/mean")), verdicts[::-1])
    for twin, shown in (*equal, ("kl/log_ratio_mean", "kl/mean")):
        assert f"{twin} = {shown}" in page.text
    assert "policy/loss 0.5" in page.text and "policy/kl_loss 0.5" in page.text


def test_a_card_and_its_chart_have_one_number_and_say_what_it_is(tmp_path):
    """40 steps have rewards 1, 2, ..., 40: the last four have a mean of 38.5, the first four of 2.5."""
    folder = make_run(tmp_path, num_steps=40, metrics=lambda step: {"rollout/reward_mean": float(step)})
    html = write_report(folder.path).read_text()
    (card,) = re.findall(r"<strong>(.*?)</strong><span>(.*?)</span>", html)
    (chart,) = re.findall(r'<b title="(.*?)">(.*?)</b>', html)
    assert card == ("38.5", "mean of the last 4 steps, from 2.5")
    assert chart == ("mean of the last 4 steps", "38.5")


def test_metrics_of_ones_own_are_drawn_whatever_else_there_is(tmp_path):
    """`extra_logs` have a section of their own; those of reward models are the run's."""
    others = [f"rollout/reward_{i}" for i in range(40)]
    logs = {"politeness": 1.0, "code/compiles": 0.0, "reward_model/tiny": 0.5}
    folder = make_run(
        tmp_path,
        num_steps=2,
        metrics=lambda step: {
            **{name: step + i for i, name in enumerate(others)},
            **dict.fromkeys((f"rollout/{name}" for name in logs), step + 0.5),
            "rollout/num_samples": 32.0,
            "timing/step_total": 1.0,
        },
    )
    write_journal(folder.rollouts_path, 1, [FAILED, trajectory(0.5, extra_logs={"politeness": 1.0})])
    write_journal(folder.rollouts_path, 2, [trajectory(0.5, extra_logs=logs)])
    page = Page(write_report(folder.path).read_text())
    drawn = [svg["aria-label"] for svg in page.named("svg")]
    assert drawn == [*others[:30], "rollout/politeness", "rollout/code/compiles"]
    assert "Your own metrics" in page.text
    assert "rollout/num_samples 32" in page.text and "rollout/reward_30" in page.text


def test_hostile_text_is_inert(tmp_path):
    folder = make_run(tmp_path / "<b>run", metrics=lambda step: {HOSTILE: 1.0, f"eval/{HOSTILE}": step})
    write_journal(
        folder.rollouts_path, 1, [trajectory(1.0, prompt=HOSTILE), FAILED], decode=lambda ids, after: HOSTILE
    )
    html = write_report(folder.path).read_text()
    page = Page(html)
    assert {"script", "img", "b"} & {tag for tag, _ in page.tags} == {"b"}  # only the last value of a chart
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", html)
    assert not any(name.startswith("on") or name in ("src", "href") for _, a in page.tags for name in a)
    assert "<script>alert(1)</script>" in page.text
    (policy,) = [meta["content"] for meta in page.named("meta") if "http-equiv" in meta]
    assert "default-src 'none'" in policy


@pytest.mark.processes
def test_a_large_run_stays_below_300_kb(tmp_path):
    """The run has more metrics than fit, long answers and a long configuration."""
    noise = lambda step, k: math.sin(step * step * (k + 1))
    folder = make_run(
        tmp_path,
        num_steps=1500,
        metrics=lambda step: {f"rollout/reward_{k}": noise(step, k) for k in range(40)},
        config="".join(f"key_{i}: value\n" for i in range(10_000)),
    )
    warnings = (to_json({"step": step, "text": "why " * 300}) + "\n" for step in range(1500))
    folder.health_path.write_text("".join(warnings))
    for step in (1, 1500):
        rows = [trajectory(1.0, prompt='"' * 50_000), trajectory(0.0, prompt="日" * 50_000), FAILED]
        write_journal(folder.rollouts_path, step, rows, decode=lambda ids, after: '"<' * 50_000)
    path = write_report(folder.path)
    assert path.stat().st_size < 300_000
    assert "rollout/reward_32" in Page(path.read_text()).text


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_just_begun(tmp_path, steps):
    folder = make_run(tmp_path, num_steps=steps, metrics=lambda step: {"loss": 0.0, "kl": math.inf})
    text = Page(write_report(folder.path).read_text()).text
    assert ("no steps yet" in text) == (steps == 0)


def test_a_report_while_the_last_line_is_being_written(tmp_path):
    folder = make_run(tmp_path)
    with open(folder.metrics_path, "a") as file:
        file.write('{"step": 4, "rollout/rew')
    assert "3 steps" in Page(write_report(folder.path).read_text()).text


def test_a_folder_that_is_not_a_run_is_named(tmp_path):
    with refused(ErrorCode.NOT_FOUND, value=tmp_path):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (0.12, 0.31, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (-3, 40, [-20, 0, 20, 40]),
        (5, 5, [2, 4, 6, 8]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
        (1e-6, 1e-6, [5e-7, 1e-6, 1.5e-6]),
        (1 - 2**-53, 1.0, [0, 0.5, 1, 1.5]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert _ticks(low, high) == pytest.approx(ticks)


def test_thinning_keeps_spikes_order_and_the_limit():
    curve = [(step, 100.0 if step == 777 else math.sin(step)) for step in range(10_000)]
    kept = thinned(curve, CURVE_POINTS)
    assert (777, 100.0) in kept and len(kept) <= 160 and kept == sorted(kept)
    assert min(v for _, v in kept) == min(v for _, v in curve)


def test_the_running_mean_does_not_lag():
    line = [(step, 2.0 * step) for step in range(300)]
    assert running_mean(line)[100] == (100, pytest.approx(200))
    assert not is_noisy(line) and is_noisy([(step, step % 2) for step in range(300)])
    assert running_mean([(0, 1.0), (1, 2.0), (2, 6.0)]) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_samples_as_plain_text():
    stream = io.StringIO()
    rollouts = [trajectory(r) for r in (0.0, 0.25, 0.5, 0.75, 1.0)] + [FAILED, FAILED]
    print_samples(few_samples(rollouts, 3), lambda ids, after: f"{HOSTILE} {ids}", stream=stream)
    text = stream.getvalue()
    assert re.findall(r"reward (\S+)  tokens 2", text) == ["1", "0.5", "0"]
    assert "[3, 4]" in text and "What is 2+2?" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_few_samples_span_the_rewards_and_leave_room_for_failures():
    rollouts = [FAILED, *(trajectory(r) for r in (0.3, 0.9, 0.1, 0.5, 0.7)), FAILED]
    assert [t.reward for t in few_samples(rollouts, 3)] == [0.9, 0.5, 0.1]
    assert [t.reward for t in few_samples(rollouts, 6)] == [0.9, 0.7, 0.5, 0.3, 0.1, None]
    assert few_samples([], 3) == []


def test_samples_with_failures_only():
    stream = io.StringIO()
    print_samples(few_samples([FAILED, FAILED], 1), str, stream=stream)
    assert stream.getvalue().count("reward –") == 1 and "env_error" in stream.getvalue()


def test_samples_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    print_samples([trajectory(1.0)], lambda ids, after: "[bold]not markup[/bold] \x1b[2J", stream=stream)
    text = stream.getvalue()
    assert "[bold]not markup[/bold] [2J" in text and "\x1b[2J" not in text and "prompt" in text


def test_metrics_of_any_name_are_drawn_once(tmp_path):
    names = ["a", "a/b/c", "loss", "x/loss", "eval/loss", "eval_x_pass1"]
    folder = make_run(tmp_path, metrics=lambda step: {name: step + i for i, name in enumerate(names)})
    page = Page(write_report(folder.path).read_text())
    assert sorted(svg["aria-label"] for svg in page.named("svg")) == sorted(names)
    assert json.loads(folder.metrics_path.read_text().splitlines()[0])["a/b/c"] == 2


def test_of_a_long_prompt_mostly_the_end_is_printed():
    stream = io.StringIO()
    print_samples([trajectory(1.0, 400 * "X" + 400 * "Z")], lambda *_, **__: "4", stream=stream)
    assert (stream.getvalue().count("X"), stream.getvalue().count("Z")) == (75, 225)


def test_a_long_name_of_a_metric_is_cut_to_60_characters():
    assert report._label("rollout/extra_" + 54 * "a") == {"section": "rollout", "words": "extra " + 54 * "a"}
    cut = report._label(f"{31 * 's'}/extra_" + 55 * "a")
    assert cut["section"] == 30 * "s" and "\u2026" in cut["words"]
