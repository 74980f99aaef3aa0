"""Writes the report of a run, `report.html` in the run folder: one page that needs no server, network or
script.

The size of each part is limited, so that the page stays below 300 kB for a run of any length.
`report.html.j2` is its template."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from openrlhf.api import (
    RunIndex,
    best_to_worst,
    clean_text,
    counted,
    format_duration,
    format_number,
    headlines,
    num_samples,
    read_label,
    read_rows,
    read_table,
    shorten,
    write_atomically,
)
from openrlhf.tools.view.curves import (
    FEW,
    OWN,
    TIMES,
    Curve,
    drawn_curve,
    equal_metrics,
    is_constant,
    sections,
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


def write_report(run_dir: str | Path) -> Path:
    """Writes `run_dir/report.html` from the files of the run folder, and returns its path. Works during the
    run too. Raises UsageError if there is no metrics.jsonl."""
    folder = RunIndex(Path(run_dir))
    path = folder.path / "report.html"
    write_atomically(path, _template().generate(build_contents(folder)))
    return path


def build_contents(folder: RunIndex) -> dict[str, Any]:
    curves = _curves(folder.metrics())
    files = folder.rollouts()
    constant = {name for name, curve in curves.items() if is_constant(curve)}
    headings = sections(curves, _logs(files))
    same = equal_metrics([curves], but={*constant, *headings.get(OWN, ())})
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
        **_metric_sections(curves, headings, constant, same),
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


def _curves(metrics: dict[int, dict[str, float]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for step in sorted(metrics):
        for name, value in metrics[step].items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _title(folder: RunIndex) -> str:
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


def _levels(curve: Curve) -> tuple[float, float, str]:
    """Returns means over the first and the last tenth of the steps, as one step is noisy, and a name."""
    finite = [value for _, value in curve if math.isfinite(value)] or [math.nan]
    width = max(1, len(finite) // 10)
    name = "last step" if width == 1 else f"mean of the last {width} steps"
    return sum(finite[:width]) / width, sum(finite[-width:]) / width, name


def _tile(name: str, curve: Curve) -> dict[str, Any]:
    first, last, last_is = _levels(curve)
    change = f"{last_is}, from {_number(first)}" if len(curve) > 1 else "one step"
    return {"label": _label(name), "value": _number(last), "change": change}


def _logs(files: dict[int, Path]) -> set[str]:
    columns = [
        read_table(files[step], ["extra_logs"])["extra_logs"].combine_chunks() for step in _ends(files)
    ]
    return {name for logs in columns for name in logs.flatten().field("name").unique().to_pylist()}


def _metric_sections(
    curves: dict[str, Curve], headings: dict[str, list[str]], constant: set[str], same: Container[str]
) -> dict[str, Any]:
    own = [name for name in headings.get(OWN, ()) if name not in constant]
    room, drawn, constants, left_out = CURVES_SHOWN - len(own[:OWN_CURVES_SHOWN]), [], [], []
    for heading, found in headings.items():
        if heading == TIMES:  # in a table
            continue
        constants += [f"{name[:80]} {_number(curves[name][0][1])}" for name in found if name in constant]
        names = [name for name in found if name not in constant and name not in same]
        size = OWN_CURVES_SHOWN if heading == OWN else room
        room -= 0 if heading == OWN else len(names[:size])
        left_out += [name[:80] for name in names[size:]]
        if charts := [_chart(name, curves[name]) for name in names[:size]]:
            drawn.append((heading, charts))
    return {"sections": drawn, "constants": constants[:60], "left_out": left_out[:60]}


def _chart(name: str, curve: Curve) -> dict[str, Any]:
    """Builds one chart, in pixels of `PLOT`: a line with dots that have tooltips, and for noisy values their
    running mean with the values pale behind it. Has no line if no value is finite."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    chart = {"name": name[:120], "label": _label(name), "num_bad": len(curve) - len(finite)}
    if not finite:
        return chart | {"last": "–", "last_is": "", "line": ""}
    y_ticks = _ticks(min(v for _, v in finite), max(v for _, v in finite))
    low, high = finite[0][0], finite[-1][0]
    x = _axis(low - (low == high), high + (low == high), PLOT["left"], PLOT["right"])
    y = _axis(y_ticks[0], y_ticks[-1], PLOT["bottom"], PLOT["top"])
    drawn, (_, last, last_is) = drawn_curve(finite, CURVE_POINTS), _levels(curve)
    raw = list(zip(drawn.steps, drawn.values, strict=True))
    line = list(zip(drawn.steps, drawn.means or drawn.values, strict=True))
    return chart | {
        "last": _number(last),
        "last_is": last_is,
        "y_ticks": [{"at": y(value), "text": _number(value)} for value in y_ticks],
        "x_ticks": _step_ticks(low, high, x),
        "raw": _points(raw, x, y) if drawn.means else "",
        "line": _points(line, x, y),
        "dots": [
            {"x": x(step), "y": y(value), "text": f"step {step:,}: {_number(value)}"}
            for step, value in line[:: math.ceil(len(line) / FEW)]
        ],
        "is_sparse": len(finite) < FEW,
    }


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _step_ticks(low: int, high: int, x: Callable) -> list[dict[str, Any]]:
    """Returns ticks at the first, a middle and the last step."""
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
            "memory": f"{max(v for _, v in peaks):.1f} GB"
            if (peaks := curves.get(f"memory/{name}_gb"))
            else "",
        }
        for name, total in sorted(totals.items(), key=lambda item: -item[1])[:20]
    ]


def _ends(files: dict[int, Path]) -> set[int]:
    return {min(files), max(files)} if files else set()


def _samples_of_step(step: int, path: Path) -> dict[str, Any]:
    table = read_table(path, ["outcome", "reward"])
    outcomes, rewards = Counter(table["outcome"].to_pylist()), table["reward"].to_pylist()
    finite = [r if r is not None and math.isfinite(r) else None for r in rewards]
    ends = (i for i in best_to_worst(finite, 2) if finite[i] is not None)
    shown = dict(zip(ends, ("best", "worst"), strict=False))
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
    if (label := read_label(row)) not in ("", None):
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


def _points(curve: Curve, x: Callable, y: Callable) -> str:
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
    files = resources.files("openrlhf.tools.view")
    source, colours = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("report.html.j2", "static/colours.css")
    )
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_cleaned
    )
    return environment.from_string(source, globals={"colours": colours})


def _cleaned(value: Any) -> Any:
    """Removes control characters from plain text. Markup of the template passes unchanged."""
    return clean_text(value) if type(value) is str else value
