"""A run on one page that needs no server, no network and no script: `report.html` in the run folder.

Everything on it is bounded, so that it stays below 300 kB however long the run was.
"""

import html
import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from openrlhf.observe.journal import (
    Decode,
    journal_steps,
    num_samples,
    read_rows,
    read_table,
    response_of,
    spread,
)
from openrlhf.observe.progress import clean_text, format_duration, format_number, pass_name
from openrlhf.observe.run_folder import RunFolder, read_jsonl, write_atomically
from openrlhf.observe.trackers import read_metrics
from openrlhf.types import Trajectory

CURVE_POINTS = 160
CURVES_SHOWN = 32
OWN_CURVES_SHOWN = 12
TILES_SHOWN = 7
SAMPLE_CHARACTERS = 800
FILE_CHARACTERS = 12_000
WARNINGS_SHOWN = 20
WARNING_CHARACTERS = 500
SAMPLES_PRINTED = 4

OWN = "Your own metrics"
"""Heading of what the reward's `extra_logs` report."""

SECTIONS = (
    ("Results", ("reward", "score", "return", "acc", "margin", "pass_rate")),
    (OWN, ()),
    (
        "Answers",
        ("length", "truncated", "repetition", "duplicate", "num_samples", "generated", "failed", "error"),
    ),
    (
        "Training",
        ("loss", "kl", "entropy", "clip", "ratio", "logprob", "log_prob", "grad_norm", "lr", "values"),
    ),
)
"""Heading, and what names of its metrics contain, in the order of the charts. The first match takes it."""

HEADLINES = (
    (r"eval[/_].*(_pass1|_score_mean|accuracy)", 2),
    (r"eval[/_].*loss", 1),
    (r"(rollout/)?(reward_mean|reward)", 1),
    (r"rollout/score_mean", 1),
    (r"(?!eval|policy|critic).*\b(accuracy|acc_mean)", 1),
    (r"(?!eval|policy|critic).*\bloss", 1),
    (r"(rollout/)?response_length_mean", 1),
    (r"kl/mean|(?!eval|mismatch).*/kl|kl", 1),
    (r"policy/entropy", 1),
    (r"(rollout/)?truncated_rate", 1),
)
"""What the tiles at the top show, in order, and how many of each. The loss of a policy or a critic does not
tell how a run goes."""


def write_report(run_dir: str | Path) -> Path:
    """Write `run_dir/report.html` from whatever is in the folder; also while the run goes on."""
    folder = RunFolder(Path(run_dir))
    if not folder.metrics_path.exists():
        raise ValueError(
            f"{folder.path} is not a run folder: it has no metrics.jsonl. Give the folder of a run."
        )
    curves = _curves(read_metrics(folder.metrics_path))
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    files = journal_steps(folder.rollouts_path)
    body = [
        _header(folder, curves, steps),
        _health_section(folder.health_path),
        *_metric_sections(curves, _own_metrics(files)),
        _time_section(curves),
        _samples_section(files),
        _text_section("Configuration", folder.path / "config.yaml"),
        _text_section("Command line", folder.path / "argv.txt"),
        _text_section("Environment", folder.path / "env.json"),
    ]
    title = f"{_escape(folder.path.resolve().name)} — run report"
    path = folder.path / "report.html"
    write_atomically(
        path, [_PAGE_START.replace("TITLE", title), *filter(None, body), "</main></body></html>\n"]
    )
    return path


def few_samples(trajectories: Sequence[Trajectory], limit: int = SAMPLES_PRINTED) -> list[Trajectory]:
    """Evenly spaced from best to worst reward, then failures if there is room."""
    return [trajectories[i] for i in spread(trajectories, limit)]


def print_samples(samples: Sequence[Trajectory], decode: Decode, *, stream: TextIO | None = None) -> None:
    """A table on a terminal, plain lines in a file."""
    stream = stream or sys.stdout
    rows = [
        (
            "–" if t.reward is None else format_number(t.reward),
            f"{t.num_actions}{' cut' if t.truncated else ''}",
            shorten(t.prompt.text, 300, keep_end=True),
            shorten(response_of(t, decode) if t.ok else f"{t.outcome.value}: {t.error}", 500),
        )
        for t in samples
    ]
    if stream.isatty():
        _print_rich(rows, stream)
        return
    for reward, tokens, prompt, answer in rows:
        print(f"--- reward {reward}  tokens {tokens}", file=stream)
        print(f"prompt: {prompt}\nanswer: {answer}", file=stream, flush=True)


Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _curves(metrics: dict[int, dict[str, float]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for step in sorted(metrics):
        for name, value in metrics[step].items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _header(folder: RunFolder, curves: dict[str, Curve], steps: list[int]) -> str:
    total = sum(value for _, value in curves.get("timing/step_total", ()) if math.isfinite(value))
    facts = [f"{len(steps):,} steps" if steps else "no steps yet"]
    if steps:
        facts.append(f"{steps[0]:,} to {steps[-1]:,}")
    if total:
        facts.append(f"{format_duration(total)} in steps")
    tiles = "".join(_tile(name, curves[name]) for name in _headline_names(curves))
    name = _escape(folder.path.resolve().name)
    facts_html = " · ".join(facts)
    return (
        f'<header><h1>{name}</h1><p class="facts">{facts_html}</p></header><div class="tiles">{tiles}</div>'
    )


def _headline_names(curves: dict[str, Curve]) -> list[str]:
    names: list[str] = []
    for pattern, limit in HEADLINES:
        found = [name for name in curves if re.fullmatch(pattern, name) and not _is_said(name, curves)]
        names += [name for name in found[:limit] if name not in names]
    return names[:TILES_SHOWN]


def _is_said(name: str, curves: dict[str, Curve]) -> bool:
    """Another curve shows the same: a mean of verdicts is pass@1, and many a score is the reward."""
    other = "rollout/reward_mean" if name == "rollout/score_mean" else pass_name(name)
    return curves.get(other or "") == curves[name]


def _tile(name: str, curve: Curve) -> str:
    finite = [value for _, value in curve if math.isfinite(value)] or [math.nan]
    # One step is noise: a tenth of the run at either end says more.
    width = max(1, len(finite) // 10)
    first, last = sum(finite[:width]) / width, sum(finite[-width:]) / width
    change = f"from {_number(first)}" if len(finite) > 1 else "one step"
    return (
        f'<div class="tile"><span class="name">{_label(name)}</span>'
        f"<strong>{_number(last)}</strong><span>{change}</span></div>"
    )


def _health_section(path: Path) -> str:
    """The newest of what looked unhealthy, oldest first."""
    if not path.exists():
        return ""
    warnings = list(read_jsonl(path))
    shown = warnings[-WARNINGS_SHOWN:]
    items = "".join(
        f"<li><b>step {_step(row['step'])}</b> {_escape(shorten(row['text'], WARNING_CHARACTERS))}</li>"
        for row in shown
    )
    left_out = len(warnings) - len(shown)
    note = f'<p class="facts">{left_out:,} earlier ones are in {path.name}</p>' if left_out else ""
    return f'<section><h2>What looks unhealthy</h2>{note}<ul class="health">{items}</ul></section>'


def _own_metrics(files: dict[int, Path]) -> set[str]:
    """Metrics made of the `extra_logs` of samples; reward models' are the run's own."""
    ends = [files[step] for step in (min(files), max(files))] if files else []
    columns = [read_table(path, ["extra_logs"])["extra_logs"].combine_chunks() for path in ends]
    names = {name for logs in columns for name in logs.flatten().field("name").unique().to_pylist()}
    return {f"rollout/{name}" for name in names if not name.startswith("reward_model/")}


def _metric_sections(curves: dict[str, Curve], own: set[str]) -> list[str]:
    """Charts; then, as text, what never changed, and what there was no room for."""
    headings: dict[str, list[str]] = {}
    constant: list[str] = []
    drawn = [name for name in curves if not name.startswith("timing/") and not _is_said(name, curves)]
    for name in sorted(drawn, key=lambda name: _place(name, own)):
        if _is_constant(curves[name]):
            constant.append(f"{_escape(name[:80])} {_number(curves[name][0][1])}")
        else:
            headings.setdefault(_heading(name, own), []).append(name)
    reserved = min(OWN_CURVES_SHOWN, len(headings.get(OWN, ())))
    room, parts, left_out = CURVES_SHOWN - reserved, [], []
    for heading, names in headings.items():
        size = reserved if heading == OWN else min(room, len(names))
        room -= 0 if heading == OWN else size
        left_out += names[size:]
        if size:
            charts = "".join(_chart(name, curves[name]) for name in names[:size])
            parts.append(f'<section><h2>{heading}</h2><div class="charts">{charts}</div></section>')
    if constant:
        parts.append(f'<p class="facts">The same in every step: {", ".join(constant[:60])}</p>')
    if left_out:
        names = ", ".join(_escape(name[:80]) for name in left_out[:60])
        parts.append(f'<p class="facts">Also in metrics.jsonl: {names}</p>')
    return parts


def _is_constant(curve: Curve) -> bool:
    return len(curve) > 1 and math.isfinite(curve[0][1]) and len({value for _, value in curve}) == 1


def _place(name: str, own: set[str]) -> tuple[int, int]:
    """Section, and place of the first matching word in it. Of an evaluation, all but what answers look like
    comes first."""
    if name in own:
        return list(dict(SECTIONS)).index(OWN), 0
    short = name.rpartition("/")[2].lower()
    if _is_evaluation(name) and not any(word in short for word in dict(SECTIONS)["Answers"]):
        return 0, -1
    for section, (_, words) in enumerate(SECTIONS):
        for place, word in enumerate(words):
            if word in short:
                return section, place
    return len(SECTIONS), 0


def _heading(name: str, own: set[str]) -> str:
    section, _ = _place(name, own)
    return SECTIONS[section][0] if section < len(SECTIONS) else "More"


def _chart(name: str, curve: Curve) -> str:
    """One small multiple: noisy values pale under their running mean, dots with tooltips."""
    width, height, left, right, top, bottom = 270, 158, 44, 8, 8, 20
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    bad = len(curve) - len(finite)
    note = f'<span class="bad">{bad} not finite</span>' if bad else ""
    last = _number(finite[-1][1]) if finite else "–"
    title = f'<span title="{_escape(name[:120])}">{_label(name)}</span>'
    caption = f"<figcaption>{title}{note}<b>{last}</b></figcaption>"
    if not finite:
        return f'<figure>{caption}<p class="empty">no finite value</p></figure>'
    y_ticks = _ticks(min(v for _, v in finite), max(v for _, v in finite))
    x_low, x_high = finite[0][0], finite[-1][0]
    x = _Axis(x_low - (x_low == x_high), x_high + (x_low == x_high), left, width - right)
    y = _Axis(y_ticks[0], y_ticks[-1], height - bottom, top)
    grid = "".join(
        f'<line x1="{left}" x2="{width - right}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text x="{left - 6}" y="{y(t) + 3.5:.1f}" text-anchor="end">{_number(t)}</text>'
        for t in y_ticks
    )
    x_ticks = sorted({x_low, x_low + (x_high - x_low) // 2, x_high})
    anchors = {x_ticks[0]: "start", x_ticks[-1]: "end"} if len(x_ticks) > 1 else {}
    grid += "".join(
        f'<text x="{x(t):.1f}" y="{height - 6}" text-anchor="{anchors.get(t, "middle")}">'
        f"{'step ' if t == x_low else ''}{_step(t)}</text>"
        for t in x_ticks
    )
    points = _thin(finite)
    noisy = len(finite) >= 30 and _is_noisy(finite)
    smooth = _thin(_running_mean(finite)) if noisy else points
    lines = f'<polyline class="{"raw" if noisy else "mean"}" points="{_points(points, x, y)}"/>'
    if noisy:
        lines += f'<polyline class="mean" points="{_points(smooth, x, y)}"/>'
    dots = "".join(
        f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="{3 if len(finite) < 30 else 4}"'
        f"><title>step {s:,}: {_number(v)}</title></circle>"
        for s, v in smooth[:: math.ceil(len(smooth) / 30)]
    )
    kind = "sparse" if len(finite) < 30 else "dense"
    return (
        f'<figure>{caption}<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_escape(name[:120])}">'
        f'<g class="grid">{grid}</g>{lines}<g class="{kind}">{dots}</g></svg></figure>'
    )


def _time_section(curves: dict[str, Curve]) -> str:
    means = {}
    for name, curve in curves.items():
        finite = [value for _, value in curve if math.isfinite(value)]
        if name.startswith("timing/") and finite:
            # A phase that is not in every step still counts per step.
            means[name.removeprefix("timing/")] = sum(finite) / len(finite), sum(finite)
    if not means:
        return ""
    whole = means.get("step_total", (0.0, 0.0))[1] or max(total for _, total in means.values()) or 1.0
    rows = "".join(
        f"<tr><th>{_escape(name[:60])}</th><td>{format_duration(mean)}</td><td>{format_duration(total)}</td>"
        f'<td class="bar"><i style="width:{min(100.0, 100 * total / whole):.1f}%"></i>'
        f"<span>{100 * total / whole:.0f} %</span></td></tr>"
        for name, (mean, total) in sorted(means.items(), key=lambda item: -item[1][1])[:20]
    )
    return (
        '<section><h2>Time</h2><table class="time"><thead><tr><th>phase</th><td>mean</td><td>total</td>'
        f'<td class="bar">share of all steps</td></tr></thead><tbody>{rows}</tbody></table></section>'
    )


def _samples_section(files: dict[int, Path]) -> str:
    """The best and the worst answer of the first and the last step."""
    if not files:
        return ""
    columns = "".join(_samples_of_step(step, files[step]) for step in sorted({min(files), max(files)}))
    return f'<section><h2>First and last answers</h2><div class="steps">{columns}</div></section>'


def _samples_of_step(step: int, path: Path) -> str:
    table = read_table(path, ["outcome", "reward"])
    outcomes, rewards = Counter(table["outcome"].to_pylist()), table["reward"].to_pylist()
    finite = [(r, i) for i, r in enumerate(rewards) if r is not None and math.isfinite(r)]
    shown: dict[int, str] = {}
    if finite:
        shown[min(finite, key=lambda pair: (-pair[0], pair[1]))[1]] = "best"
        shown.setdefault(min(finite, key=lambda pair: (pair[0], -pair[1]))[1], "worst")
    if None in rewards:
        shown[rewards.index(None)] = "failed"
    counts = ", ".join(f"{_escape(name)} {count:,}" for name, count in outcomes.most_common())
    if num_samples(table) > len(table):
        counts += f" of {num_samples(table):,} samples"
    rows = zip(shown.values(), read_rows(path, list(shown)), strict=True)
    cards = "".join(_sample_card(kind, row) for kind, row in rows)
    return f'<div><h3>Step {step:,} <span class="facts">{counts}</span></h3>{cards}</div>'


def _sample_card(kind: str, row: dict[str, Any]) -> str:
    reward = "" if row["reward"] is None else f"reward {_number(row['reward'])}"
    tokens = len(row["rollout_log_probs"])
    facts = [kind, reward, f"{tokens:,} tokens", "cut off" if row["truncated"] else ""]
    answer = row["response"] if row["response"] is not None else f"token ids {row['token_ids'][:200]}"
    if row["error"]:
        answer = f"{answer}\n[{row['error']}]".strip()
    label = json.loads(row["label"])
    label = "" if label in ("", None) else f"<dt>label</dt><dd>{_sample_text(label)}</dd>"
    return (
        f'<article class="{kind}"><h4>{" · ".join(filter(None, facts))}</h4><dl>'
        f"<dt>prompt</dt><dd>{_sample_text(row['prompt'], keep_end=True)}</dd>"
        f"<dt>answer</dt><dd>{_sample_text(answer)}</dd>{label}</dl></article>"
    )


def _text_section(heading: str, path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    text = _escape(shorten(text, FILE_CHARACTERS))
    return f"<section><details><summary>{heading}</summary><pre>{text}</pre></details></section>"


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round values that enclose low and high."""
    if low == high:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [round(i * unit, 12 - math.floor(math.log10(unit))) for i in range(first, last + 1)]


def _thin(curve: Curve) -> Curve:
    """At most CURVE_POINTS points. Of each bucket the lowest and the highest stay, so a spike is not lost."""
    if len(curve) <= CURVE_POINTS:
        return curve
    size = math.ceil(len(curve) / (CURVE_POINTS // 2))
    thinned = []
    for start in range(0, len(curve), size):
        bucket = curve[start : start + size]
        extremes = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        thinned += sorted(extremes)
    return thinned


def _is_noisy(curve: Curve) -> bool:
    """It goes up and down by several times its range. A schedule or a slow trend does not."""
    values = [value for _, value in curve]
    travelled = sum(abs(b - a) for a, b in itertools.pairwise(values))
    return travelled > 4 * (max(values) - min(values))


def _running_mean(curve: Curve) -> Curve:
    """Each point with its neighbours, a fifteenth of the run in all: centred, so a trend is not delayed."""
    half = max(2, len(curve) // 30)
    sums = [0.0, *itertools.accumulate(value for _, value in curve)]
    smooth = []
    for i, (step, _) in enumerate(curve):
        start, end = max(0, i - half), min(len(curve), i + half + 1)
        smooth.append((step, (sums[end] - sums[start]) / (end - start)))
    return smooth


def _points(curve: Curve, x: _Axis, y: _Axis) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)


def _is_evaluation(name: str) -> bool:
    return name.startswith(("eval/", "eval_"))


def _label(name: str) -> str:
    """The section pale, the rest in words."""
    section, _, short = name.rpartition("/")
    prefix = f"<i>{_escape(section[:30])}</i> " if section else ""
    return prefix + _escape(shorten(short.replace("_", " "), 60))


def _number(value: float) -> str:
    return format_number(value).replace("-", "\u2212", 1) if value < 0 else format_number(value)


def _step(step: int) -> str:
    return f"{step:,}" if step < 100_000 else format_number(step)


def _sample_text(value: Any, *, keep_end: bool = False) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _escape(shorten(text, SAMPLE_CHARACTERS, keep_end=keep_end))


def _escape(text: str) -> str:
    return html.escape(clean_text(text))


def shorten(text: str, limit: int, *, keep_end: bool = False) -> str:
    text = clean_text(text).strip()
    if len(text) <= limit:
        return text
    # The question is at the end of a long prompt; an answer keeps its beginning and its conclusion.
    head = limit // 4 if keep_end else limit * 2 // 3
    return f"{text[:head]} […{len(text) - limit:,} characters…] {text[len(text) - (limit - head) :]}"


def _print_rich(rows: list[tuple[str, str, str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, width=shutil.get_terminal_size().columns)
    table = Table(title="samples", show_lines=True, expand=True)
    for heading, justify, ratio in (("reward", "right", None), ("tokens", "right", None)):
        table.add_column(heading, justify=justify, ratio=ratio)
    table.add_column("prompt", ratio=2)
    table.add_column("answer", ratio=3)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


_PAGE_START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>TITLE</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #66707c;
  --line: #e3e6ea; --curve: #2563c9; --good: #1a7f4b; --bad: #c03a2b; --warn: #a8690a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1d2127; --text: #e7eaee; --soft: #97a1ad; --line: #323841;
  --curve: #6ea8ff; --good: #4cc38a; --bad: #ff7b6b; --warn: #e0a948; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 15px; margin: 0 0 8px; }
h4 { font-size: 13px; margin: 0 0 8px; font-weight: 600; }
.facts { color: var(--soft); font-weight: 400; margin: 4px 0 0; font-size: 14px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px;
  margin-top: 18px; }
.tile, figure, article, table, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.tile { padding: 12px 16px; display: flex; flex-direction: column; color: var(--soft); font-size: 13px; }
.tile strong { font-size: 28px; line-height: 1.25; color: var(--text); font-weight: 600; }
.health { margin: 0; padding: 12px 16px 12px 32px; background: var(--card); font-size: 14px;
  border: 1px solid var(--line); border-left: 4px solid var(--warn); border-radius: 10px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 12px; }
figure { margin: 0; padding: 10px 12px 6px; min-width: 0; }
figcaption { display: flex; gap: 8px; font-size: 13px; align-items: baseline; }
figcaption span:first-child { flex: 1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
figcaption b { font-size: 15px; font-variant-numeric: tabular-nums; }
figcaption i, .name i { color: var(--soft); font-style: normal; }
.tile .name { color: var(--text); }
.bad { color: var(--bad); font-size: 12px; }
.empty { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.grid line { stroke: var(--line); }
.grid text { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
polyline { fill: none; stroke: var(--curve); stroke-linejoin: round; stroke-linecap: round; }
.raw { opacity: .3; stroke-width: 1; }
.mean { stroke-width: 2; }
circle { fill: var(--curve); }
.dense circle { opacity: 0; }
.dense circle:hover { opacity: 1; }
table { border-collapse: separate; border-spacing: 0; width: 100%; padding: 6px 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px 5px 0; text-align: left; font-weight: 400; font-size: 14px; white-space: nowrap; }
tbody th, tbody td { border-top: 1px solid var(--line); }
thead th, thead td { color: var(--soft); font-size: 13px; }
td.bar { width: 60%; padding-right: 0; }
.bar i { display: inline-block; height: 10px; max-width: calc(100% - 52px); min-width: 2px;
  border-radius: 3px;  background: var(--curve); }
.bar span { color: var(--soft); margin-left: 8px; font-size: 13px; }
.steps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 20px; }
article { padding: 12px 16px; margin-bottom: 12px; border-left-width: 4px; }
article.best { border-left-color: var(--good); }
article.worst { border-left-color: var(--bad); }
article.failed { border-left-color: var(--warn); }
dl { margin: 0; display: grid; grid-template-columns: auto 1fr; gap: 6px 14px; font-size: 14px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; max-height: 15em; overflow-y: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; min-width: 0; }
details { padding: 10px 16px; margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
pre { margin: 10px 0 0; font-size: 13px; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
</style></head><body><main>
"""
