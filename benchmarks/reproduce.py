"""Repeats rows of docs/results.md: trains a small model on a verifiable task, and scores it before and after.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py --row tiny-words-grpo --seed 0
    python benchmarks/reproduce.py --quick

A row writes its result to benchmarks/results/, from which `--page` makes docs/results.md. `--check` writes
nothing: it compares with those results, and fails if two seeds of a row leave their intervals.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from reproducible import ROOT
from reproducible.outcome import RESULTS, Outcome, agrees, read, write
from reproducible.page import filled
from reproducible.rows import ROWS, Row

PAGE = ROOT / "docs" / "results.md"
LIMIT = 6 * 3600
"""Seconds after which a row is stopped."""


def main() -> None:
    options = parse_options()
    if options.list:
        print(*map(listed, ROWS.values()), sep="\n")
    elif options.page:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        rows = [row for row in ROWS.values() if (row.quick if options.quick else row.name == options.row)]
        if options.check:
            sys.exit("\n".join(filter(None, (difference(row, options) for row in rows))) or None)
        for row in rows:
            for seed in row.seeds if options.seed is None else (options.seed,):
                outcome = repeat(row, seed, options)
                print(f"{row.name}, seed {seed}: {described(outcome)}", flush=True)
                if options.steps is None:
                    write(row.name, seed, outcome, options.results)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--row", choices=ROWS, metavar="ROW", help="repeat this row")
    what.add_argument("--quick", action="store_true", help="repeat the rows of the scheduled workflow")
    what.add_argument("--list", action="store_true", help="print all rows")
    what.add_argument("--page", action="store_true", help="write the tables of docs/results.md")
    parser.add_argument("--seed", type=int, help="default: every seed of the row")
    parser.add_argument("--check", action="store_true", help="compare with the results, and write nothing")
    parser.add_argument("--steps", type=int, help="try another number of steps, and write nothing")
    parser.add_argument(
        "--folder", type=Path, default=Path("reproduce"), help="keeps models and runs (default: reproduce)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results)"
    )
    parser.add_argument(
        "--smollm2", type=Path, metavar="FOLDER", help="folder of SmolLM2 (default: `openrlhf fetch smollm2`)"
    )
    return parser.parse_args()


def listed(row: Row) -> str:
    marks = [f"seeds {' '.join(map(str, row.seeds))}", f"{row.steps} steps", *["quick"] * row.quick]
    done = sorted(read(row.name))
    return f"{row.name:<34} {', '.join(marks)}" + (f"; measured: {' '.join(map(str, done))}" if done else "")


def repeat(row: Row, seed: int, options: argparse.Namespace) -> Outcome:
    """Runs a row in a process of its own, forked from this one, which has the imports already. Raises
    RuntimeError if it fails."""
    from reproducible import loops, start  # noqa: F401

    from openrlhf.tools.fetch.fetch import fetch

    folder = (options.folder / row.model / f"seed{seed}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / f"{row.name}.log", folder / f"{row.name}.json"
    result.unlink(missing_ok=True)
    steps = options.steps or row.steps
    smollm2 = str(options.smollm2 or fetch("smollm2")) if row.model == "smollm2" else ""
    arguments = (replace(row, steps=steps), seed, folder, smollm2, log, result)
    child = get_context("fork").Process(target=inside, args=arguments)
    child.start()
    child.join(LIMIT)
    if child.exitcode is None:
        child.kill()
        child.join()
    if not result.exists():
        text = f"{row.name} with seed {seed}: exit {child.exitcode}; the end of {log}:"
        raise RuntimeError(f"{text}\n{log.read_text()[-3000:]}")
    return Outcome.from_dict(json.loads(result.read_text()))


def inside(row: Row, seed: int, folder: Path, smollm2: str, log: Path, result: Path) -> None:
    """Prepares and runs a row in this process, and writes its outcome to a file."""
    from reproducible.loops import run
    from reproducible.start import prepare

    with log.open("w", encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    model, task = prepare(row, seed, folder, smollm2)
    result.write_text(json.dumps(asdict(run(row, seed, model, task))), encoding="utf-8")


def difference(row: Row, options: argparse.Namespace) -> str:
    """Repeats a row. Returns what is different from its results; "" if a seed agrees. A second seed decides
    after a first one that leaves the intervals."""
    known = read(row.name, options.results)
    if not known:
        return f"{row.name}: no results in {options.results}"
    found = []
    for seed in row.seeds[:2] if options.seed is None else (options.seed,):
        outcome = repeat(row, seed, options)
        print(f"{row.name}, seed {seed}: {described(outcome)}", flush=True)
        if agrees(outcome, known.values()):
            return ""
        found.append(outcome)
    got, expected = (", ".join(f"{one.after.fraction:.3f}" for one in of) for of in (found, known.values()))
    return f"{row.name}: {got} after training, and the results have {expected}"


def described(outcome: Outcome) -> str:
    scores = f"{outcome.before.fraction:.3f} -> {outcome.after.fraction:.3f}"
    return f"{scores}, {outcome.minutes} minutes ({outcome.cpu_minutes} of CPU)"


if __name__ == "__main__":
    main()
