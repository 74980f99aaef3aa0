"""Writes the report of a run, `report.html` in the run folder: one page that needs no server, network or
script.

The size of each part is limited, so that the page stays below 300 kB for a run of any length.
`report.html.j2` is its template."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, StrictUndefined, Template

from openrlhf.api import (
    RunIndex,
    clean_text,
    counted,
    format_duration,
    format_number,
    headlines,
    is_evaluation,
    label_of,
    num_samples,
    read_rows,
    read_table,
    shorten,
    thinned,
    write_atomically,
)

CURVE_POINTS = 160
CURVES_SHOWN = 32
OWN_CURVES_SHOWN = 12
TILES_SHOWN = 7
SAMPLE_CHARACTERS = 800
FILE_CHARACTERS = 12_000
SAME_SHOWN = 20
WARNINGS_SHOWN = 20
WARNING_CHARACTERS = 500

PLOT = {"width": 270, "height": 158, "left": 44, "right": 262, "top": 8, "bottom": 138}
"""Size of a chart and of its plot area, in pixels."""

TEXT_FILES = {"Configuration": "config.yaml", "Command line": "argv.txt", "Environment": "env.json"}
"""Heading -> file of the run folder shown below it."""

OWN = "Your own metrics"
"""Heading of the metrics from the reward's `extra_logs`."""

SECTIONS = (
    ("Results", ("reward", "score", "acc", "margin", "pass_rate")),
    (OWN, ()),
    (
        "Answers",
        ("length", "truncated", "repetition", "duplicate", "num_samples", "generated", "failed", "error"),
    ),
    (
        "Training",
        (
            "loss",
            "kl",
            "entropy",
            "clip",
            "ratio",
            "logprob",
            "log_prob",
            "grad_norm",
            "lr",
            "values",
            "return",
        ),
    ),
)
"""(heading, words in the names of its metrics), in the order of the charts. A metric belongs to the first
match."""


def write_report(run_dir: str | Path) -> Path:
    """Writes `run_dir/report.html` from the files of the run folder, and returns its path. Works during the
    run too. Raises UsageError if there is no metrics.jsonl."""
    folder = RunIndex(Path(run_dir))
    path = folder.path / "report.html"
    write_atomically(path, _template().generate(contents_of(folder)))
    return path


def contents_of(folder: RunIndex) -> dict[str, Any]:
    """Returns the variables of the page's template."""
    curves = _curves(folder.metrics())
    files = folder.rollouts()
    own = _own_metrics(files)
    same = _same(curves, own)
    shown = headlines(name for name in curves if name not in same)
    warnings = folder.warnings
    return {
        "name": _title(folder),
        "facts": _facts(curves),
        "tiles": [_tile(name, curves[name]) for name in shown[:TILES_SHOWN]],
        "warnings": [
            {"step": _step(row["step"]), "text": shorten(row["text"], WARNING_CHARACTERS)}
            for row in warnings[-WARNINGS_SHOWN:]
        ],
        "num_earlier_warnings": max(0, len(warnings) - WARNINGS_SHOWN),
        "warnings_file": folder.health_path.name,
        **_metric_sections(curves, own, same),
        "same": [f"{name[:80]} = {other[:80]}" for name, other in same.items()][:SAME_SHOWN],
        "plot": PLOT,
        "times": _times(curves),
        "steps": [_samples_of_step(step, files[step]) for step in sorted(_ends(files))],
        "texts": [
            (heading, shorten(text, FILE_CHARACTERS))
            for heading, name in TEXT_FILES.items()
            if (text := folder.read(name))
        ],
    }


Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def _curves(metrics: dict[int, dict[str, float]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for step in sorted(metrics):
        for name, value in metrics[step].items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _title(folder: RunIndex) -> str:
    """Returns the run's name, model, algorithm and date, as far as the folder has them."""
    flags = folder.flags
    words = folder.read("argv.txt")
    command, date = (re.search(pattern, words) for pattern in (r"cli\.train_([a-z]+)", r"# (\S+ \d+:\d+)"))
    name = flags.get("logger.wandb.run_name") or folder.path.resolve().name
    algorithm = flags.get("algo.advantage.estimator") or (command[1] if command else "")
    return " · ".join(filter(None, [name, Path(folder.model).name, algorithm, date[1] if date else ""]))


def _facts(curves: dict[str, Curve]) -> list[str]:
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    total = sum(value for _, value in curves.get("timing/step_total", ()) if math.isfinite(value))
    facts = [counted(len(steps), "step") if steps else "no steps yet"]
    if steps:
        facts.append(f"{steps[0]:,} to {steps[-1]:,}")
    if total:
        facts.append(f"total step time {format_duration(total)}")
    return facts


def _same(curves: dict[str, Curve], own: Container[str]) -> dict[str, str]:
    """Returns metric -> earlier metric with equal values at every step, such as pass@1 and the mean of scores
    that are 0 or 1. Leaves out users' own metrics and constant ones."""
    before: dict[tuple, list[str]] = {}
    same: dict[str, str] = {}
    for name, curve in curves.items():
        if name in own or len(curve) < 2 or _is_constant(curve):
            continue
        others = before.setdefault(tuple(step for step, _ in curve), [])
        if twin := next((other for other in others if _are_equal(curves[other], curve)), None):
            same[name] = twin
        else:
            others.append(name)
    return same


def _are_equal(first: Curve, second: Curve) -> bool:
    """Returns True if two curves with the same steps are equal up to float32 rounding."""
    pairs = zip(first, second, strict=True)
    return all(
        math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for (_, a), (_, b) in pairs
    )


@dataclass(frozen=True, slots=True)
class Level:
    """Levels of a curve at its beginning and end. They are means over a tenth of its steps, because a single
    step is noisy."""

    first: float
    """Mean of the first `width` steps."""
    last: float
    """Mean of the last `width` steps."""
    width: int

    @classmethod
    def of(cls, curve: Curve) -> Self:
        finite = [value for _, value in curve if math.isfinite(value)] or [math.nan]
        width = max(1, len(finite) // 10)
        return cls(sum(finite[:width]) / width, sum(finite[-width:]) / width, width)

    @property
    def text(self) -> str:
        return "last step" if self.width == 1 else f"mean of the last {self.width} steps"


def _tile(name: str, curve: Curve) -> dict[str, Any]:
    level = Level.of(curve)
    change = f"{level.text}, from {_number(level.first)}" if len(curve) > 1 else "one step"
    return {"label": _label(name), "value": _number(level.last), "change": change}


def _own_metrics(files: dict[int, Path]) -> set[str]:
    """Returns the metrics that come from the `extra_logs` of samples, except those of reward models."""
    columns = [
        read_table(files[step], ["extra_logs"])["extra_logs"].combine_chunks() for step in _ends(files)
    ]
    names = {name for logs in columns for name in logs.flatten().field("name").unique().to_pylist()}
    return {f"rollout/{name}" for name in names if not name.startswith("reward_model/")}


def _metric_sections(curves: dict[str, Curve], own: set[str], same: Container[str]) -> dict[str, Any]:
    """Returns the charts by section, metrics with one value, and those beyond the limit of charts."""
    headings: dict[str, list[str]] = {}
    constants: list[str] = []
    in_table = ("timing/", "memory/")
    drawn = [name for name in curves if not name.startswith(in_table) and name not in same]
    for name in sorted(drawn, key=lambda name: _place(name, own)):
        if _is_constant(curves[name]):
            constants.append(f"{name[:80]} {_number(curves[name][0][1])}")
        else:
            headings.setdefault(_heading(name, own), []).append(name)
    reserved = min(OWN_CURVES_SHOWN, len(headings.get(OWN, ())))
    room, sections, left_out = CURVES_SHOWN - reserved, [], []
    for heading, names in headings.items():
        size = reserved if heading == OWN else min(room, len(names))
        room -= 0 if heading == OWN else size
        left_out += [name[:80] for name in names[size:]]
        if size:
            sections.append((heading, [_chart(name, curves[name]) for name in names[:size]]))
    return {"sections": sections, "constants": constants[:60], "left_out": left_out[:60]}


def _is_constant(curve: Curve) -> bool:
    return math.isfinite(curve[0][1]) and len({value for _, value in curve}) == 1


def _place(name: str, own: set[str]) -> tuple[int, int]:
    """Returns the sort key of a metric: its section and the place of the first matching word in it.
    Evaluation metrics come first, except those about answers."""
    if name in own:
        return list(dict(SECTIONS)).index(OWN), 0
    short = name.rpartition("/")[2].lower()
    if is_evaluation(name) and not any(word in short for word in dict(SECTIONS)["Answers"]):
        return 0, -1
    for section, (_, words) in enumerate(SECTIONS):
        for place, word in enumerate(words):
            if word in short:
                return section, place
    return len(SECTIONS), 0


def _heading(name: str, own: set[str]) -> str:
    section, _ = _place(name, own)
    return SECTIONS[section][0] if section < len(SECTIONS) else "More"


def _chart(name: str, curve: Curve) -> dict[str, Any]:
    """Builds one chart, in pixels of `PLOT`: a line with dots that have tooltips, and for noisy values their
    running mean with the values pale behind it. Has no lines if no value is finite."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    chart = {"name": name[:120], "label": _label(name), "num_bad": len(curve) - len(finite)}
    if not finite:
        return chart | {"last": "–", "last_is": "", "lines": []}
    y_ticks = _ticks(min(v for _, v in finite), max(v for _, v in finite))
    low, high = finite[0][0], finite[-1][0]
    x = _Axis(low - (low == high), high + (low == high), PLOT["left"], PLOT["right"])
    y = _Axis(y_ticks[0], y_ticks[-1], PLOT["bottom"], PLOT["top"])
    points = thinned(finite, CURVE_POINTS)
    is_sparse = len(finite) < 30
    is_noisy = not is_sparse and _is_noisy(finite)
    smooth = thinned(_running_mean(finite), CURVE_POINTS) if is_noisy else points
    raw = [{"kind": "raw", "points": _points(points, x, y)}] if is_noisy else []
    level = Level.of(curve)
    return chart | {
        "last": _number(level.last),
        "last_is": level.text,
        "y_ticks": [{"at": y(value), "text": _number(value)} for value in y_ticks],
        "x_ticks": _step_ticks(low, high, x),
        "lines": [*raw, {"kind": "mean", "points": _points(smooth, x, y)}],
        "dots": [
            {"x": x(step), "y": y(value), "text": f"step {step:,}: {_number(value)}"}
            for step, value in smooth[:: math.ceil(len(smooth) / 30)]
        ],
        "is_sparse": is_sparse,
    }


def _step_ticks(low: int, high: int, x: _Axis) -> list[dict[str, Any]]:
    """Returns ticks at the first, a middle and the last step. The outer labels are aligned with the ends of
    the plot."""
    anchors = {low: "start", high: "end"} if low < high else {}
    return [
        {
            "at": x(step),
            "text": f"{'step ' if step == low else ''}{_step(step)}",
            "anchor": anchors.get(step, "middle"),
        }
        for step in sorted({low, low + (high - low) // 2, high})
    ]


def _times(curves: dict[str, Curve]) -> list[dict[str, str]]:
    """Returns one table row of times per phase, the longest first. Means are over the steps that have the
    phase."""
    phases = {
        name.removeprefix("timing/"): finite
        for name, curve in curves.items()
        if name.startswith("timing/") and (finite := [value for _, value in curve if math.isfinite(value)])
    }
    totals = {name: sum(finite) for name, finite in phases.items()}
    whole = totals.get("step_total", 0.0) or max(totals.values(), default=0.0) or 1.0
    return [
        {
            "name": name[:60],
            "mean": format_duration(total / len(phases[name])),
            "total": format_duration(total),
            "width": f"{min(100.0, 100 * total / whole):.1f}",
            "share": f"{100 * total / whole:.0f}",
            "memory": _peak(curves.get(f"memory/{name}_gb", [])),
        }
        for name, total in sorted(totals.items(), key=lambda item: -item[1])[:20]
    ]


def _peak(curve: Curve) -> str:
    """Formats the peak over all steps in GB; "" if none was measured."""
    return f"{max(value for _, value in curve):.1f} GB" if curve else ""


def _ends(files: dict[int, Path]) -> set[int]:
    """Returns the first and the last step."""
    return {min(files), max(files)} if files else set()


def _samples_of_step(step: int, path: Path) -> dict[str, Any]:
    """Returns the best and the worst answer of a step, and a failed one."""
    table = read_table(path, ["outcome", "reward"])
    outcomes, rewards = Counter(table["outcome"].to_pylist()), table["reward"].to_pylist()
    finite = [(r, i) for i, r in enumerate(rewards) if r is not None and math.isfinite(r)]
    shown: dict[int, str] = {}
    if finite:
        shown[min(finite, key=lambda pair: (-pair[0], pair[1]))[1]] = "best"
        shown.setdefault(min(finite, key=lambda pair: (pair[0], -pair[1]))[1], "worst")
    if None in rewards:
        shown[rewards.index(None)] = "failed"
    counts = ", ".join(f"{name} {count:,}" for name, count in outcomes.most_common())
    if num_samples(table) > len(table):
        counts += f" of {num_samples(table):,} samples"
    rows = zip(shown.values(), read_rows(path, list(shown)), strict=True)
    return {
        "step": f"{step:,}",
        "outcomes": counts,
        "samples": [_sample(kind, row) for kind, row in rows],
    }


def _sample(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    reward = "" if row["reward"] is None else f"reward {_number(row['reward'])}"
    tokens = len(row["rollout_log_probs"])
    facts = [kind, reward, f"{tokens:,} tokens", "cut off" if row["truncated"] else ""]
    answer = row["response"] if row["response"] is not None else f"token ids {row['token_ids'][:200]}"
    if row["error"]:
        answer = f"{answer}\n[{row['error']}]".strip()
    texts = [("prompt", _sample_text(row["prompt"], keep_end=True)), ("answer", _sample_text(answer))]
    if (label := label_of(row)) not in ("", None):
        texts.append(("label", _sample_text(label)))
    return {"kind": kind, "facts": [fact for fact in facts if fact], "texts": texts}


def _ticks(low: float, high: float) -> list[float]:
    """Returns three to six round values that include `low` and `high` in their range."""
    if math.isclose(low, high):  # values that differ only by rounding have no ticks between
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [round(i * unit, 12 - math.floor(math.log10(unit))) for i in range(first, last + 1)]


def _is_noisy(curve: Curve) -> bool:
    """Returns True if the curve's total variation is more than 4 times its range. It is less for a schedule
    or a slow trend."""
    values = [value for _, value in curve]
    travelled = sum(abs(b - a) for a, b in itertools.pairwise(values))
    return travelled > 4 * (max(values) - min(values))


def _running_mean(curve: Curve) -> Curve:
    """Averages each point with its neighbours on both sides, a fifteenth of the run in all, so that trends
    are not delayed."""
    half = max(2, len(curve) // 30)
    sums = [0.0, *itertools.accumulate(value for _, value in curve)]
    smooth = []
    for i, (step, _) in enumerate(curve):
        start, end = max(0, i - half), min(len(curve), i + half + 1)
        smooth.append((step, (sums[end] - sums[start]) / (end - start)))
    return smooth


def _points(curve: Curve, x: _Axis, y: _Axis) -> str:
    return " ".join(f"{x(step)},{y(value)}" for step, value in curve)


def _label(name: str) -> dict[str, str]:
    """Returns a metric's display name: its section, and the rest in words."""
    section, _, short = name.rpartition("/")
    return {"section": section[:30], "words": shorten(short.replace("_", " "), 60)}


def _number(value: float) -> str:
    return format_number(value).replace("-", "\u2212", 1) if value < 0 else format_number(value)


def _step(step: int) -> str:
    return f"{step:,}" if step < 100_000 else format_number(step)


def _sample_text(value: Any, *, keep_end: bool = False) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(text, SAMPLE_CHARACTERS, keep_end=keep_end)


@cache
def _template() -> Template:
    source = resources.files("openrlhf.tools.view").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_cleaned
    )
    return environment.from_string(source)


def _cleaned(value: Any) -> Any:
    """Removes control characters from plain text. Markup of the template passes unchanged."""
    return clean_text(value) if type(value) is str else value
