"""Times of `openrlhf view` with a synthetic run of a million rollouts.

    first opening   until the page has the curves and its newest rollouts; the rest is indexed meanwhile
    indexing        until all rollouts are indexed
    opening         the same run again, with the index of before
    ...             one request of the page each, over all rollouts

Seconds are wall-clock time and, behind it, CPU time of the process, which other work on the machine does not
lengthen. Exits with an error if a filter finds another number of rollouts than the generator wrote.

    python benchmarks/view.py
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.files import cache_folder
from openrlhf.observability.journal import _ENCODING, ROW_GROUP
from openrlhf.observability.rollout_table import SCHEMA
from openrlhf.tools.view.search import Search, choices, errors, find
from openrlhf.tools.view.server import Viewer

TEXT = (
    "the sum of two numbers is what we add then multiply by three so that answer equals therefore because "
    "let x be a prime and divide it into equal parts check whether this holds for all cases since each step "
    "follows from before we get total remainder square root of area under curve which means final result"
)
PROMPTS = 20_000
NEEDLE = "zanzibar"
"""A word that every NEEDLE_EVERY-th answer has."""
NEEDLE_EVERY = 9_973
FAILED_EVERY = 1_000
METRICS = 100


def write_run(folder: Path, steps: int, samples: int, tokens: int) -> None:
    """Writes a run of `steps` steps with `samples` rollouts each; answers have up to `tokens` tokens."""
    (folder / "rollouts").mkdir(parents=True)
    numbers = np.random.default_rng(0)
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(TEXT.split(), k=14)) + ". " for _ in range(5_000)]
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            row = {f"group{i % 10}/metric{i}": float(numbers.normal()) for i in range(METRICS)}
            file.write(json.dumps({"step": step, "rollout/reward_mean": step / steps, **row}) + "\n")
    for step in range(1, steps + 1):
        first = (step - 1) * samples
        table = table_of_step(first, samples, tokens, step, steps, numbers, partial(draw.choices, sentences))
        path = folder / "rollouts" / f"step_{step:06d}.parquet"
        pq.write_table(table, path, row_group_size=ROW_GROUP, **_ENCODING)


def table_of_step(
    first: int,
    samples: int,
    tokens: int,
    step: int,
    steps: int,
    numbers: np.random.Generator,
    draw: Callable[..., list[str]],
) -> pa.Table:
    """Returns the journal of a step whose first rollout is the `first`-th of the run."""
    ids = np.arange(first, first + samples)
    lengths = numbers.integers(1, tokens + 1, samples)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    failed = ids % FAILED_EVERY == 0
    log_probs = -numbers.exponential(0.5, ends[-1]).astype(np.float32)
    lists = lambda values, type_: pa.ListArray.from_arrays(ends, pa.array(values, type_))
    ones = pa.array(np.arange(samples + 1, dtype=np.int32))
    pair = lambda names, *values: pa.ListArray.from_arrays(
        ones, pa.StructArray.from_arrays([pa.array(v, pa.int32()) for v in values], names)
    )
    answers = [
        "".join(draw(k=6)) + (f"{NEEDLE} " if i % NEEDLE_EVERY == 0 else "") + f"The answer is {i}."
        for i in ids
    ]
    rewards = np.clip(numbers.normal(step / steps, 0.3, samples), 0, 1)
    columns: dict[str, Any] = {
        "prompt_id": ids // 8 % PROMPTS,
        "epoch": ids // 8 // PROMPTS,
        "sample_index": ids % 8,
        "part": np.zeros(samples),
        "seed": ids,
        "source": [f"source{i % 3}" for i in ids],
        "label": ["null"] * samples,
        "prompt": [f"Problem {i}: {TEXT}" for i in ids // 8 % PROMPTS],
        "response": answers,
        "images": [[]] * samples,
        "reward": pa.array(rewards, mask=failed),
        "score": pa.array(rewards, mask=failed),
        "outcome": np.where(failed, "env_error", "ok"),
        "error": np.where(failed, "TimeoutError: no answer in 30 s", ""),
        "finish_reason": np.where(lengths == tokens, "length", "stop"),
        "truncated": lengths == tokens,
        "extra_logs": [[{"name": "format", "value": float(i % 2)}] for i in ids],
        "token_ids": lists(numbers.integers(0, 30_000, ends[-1]), pa.int32()),
        "action_ranges": pair(["start", "end"], np.zeros(samples), lengths),
        "turn_starts": pa.ListArray.from_arrays(ones, pa.array(np.zeros(samples), pa.int32())),
        "weight_versions": pair(["version", "count"], np.full(samples, step - 1), lengths),
        "rollout_log_probs": lists(log_probs, pa.float32()),
        "log_probs": lists(log_probs + 0.01, pa.float32()),
        "advantages": lists(np.repeat(rewards - rewards.mean(), lengths), pa.float32()),
    }
    nulls = {f.name: pa.nulls(samples, f.type) for f in SCHEMA if f.name not in columns}
    arrays = {name: v if isinstance(v, pa.Array) else pa.array(v) for name, v in columns.items()}
    return pa.table(arrays | nulls).select(SCHEMA.names).cast(SCHEMA)


def timed(title: str, work: Callable[[], Any]) -> Any:
    """Runs `work`, prints its seconds, and returns its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    print(
        f"{title:<44}{time.perf_counter() - wall:8.2f} s{time.process_time() - cpu:10.2f} s CPU", flush=True
    )
    return result


def open_page(folder: Path) -> tuple[Viewer, list[dict[str, Any]]]:
    """Does what a page asks for when it is opened, and returns its viewer and the listed rollouts."""
    viewer = Viewer([folder], lambda folder, row: [])
    viewer.state()
    viewer.index.update()
    viewer.curves(viewer.metric_names()["headlines"])
    return viewer, find(viewer.index, Search())["rows"]


def measure(folder: Path, rollouts: int) -> None:
    viewer, _ = timed("first opening", lambda: open_page(folder))
    timed("indexing", lambda: [None for _ in iter(viewer.index.update, False)])
    viewer.index.close()
    kept = sum(path.stat().st_size for path in (cache_folder() / "view").iterdir())
    print(f"{'size of the index':<44}{kept / 1e6:8.0f} MB")
    viewer, rows = timed("opening", lambda: open_page(folder))
    index = viewer.index
    wrong = []
    needles = len(range(0, rollouts, NEEDLE_EVERY))
    failures = len(range(0, rollouts, FAILED_EVERY))
    searches: dict[str, tuple[Search, int | None]] = {
        "all, newest first": (Search(), rollouts),
        "sorted by reward": (Search(sort="reward"), rollouts),
        "page 1000 of rewards": (Search(sort="reward", offset=50_000), rollouts if rollouts > 50_000 else 0),
        "rewards in a range, sorted by length": (Search(reward_min=0.4, reward_max=0.5, sort="length"), None),
        "one prompt": (Search(prompt_id=77, descending=False), None),
        "cut off": (Search(truncated=True), None),
        "failed": (Search(failed=True), failures),
        "a rare word in prompt or answer": (Search(text=NEEDLE), needles),
        "a rare word, without regard to case": (Search(text=NEEDLE.upper(), ignore_case=True), needles),
        "a frequent word in answers, by reward": (Search(response="therefore", sort="reward"), None),
        "a log in a range, sorted by it": (Search(log="format", log_min=1, by_log=True), rollouts // 2),
    }
    for title, (search, expected) in searches.items():
        total = timed(title, lambda search=search: find(index, search))["total"]
        if expected not in (None, total):
            wrong.append(f"{title}: {total} rollouts instead of {expected}")
    timed("errors", lambda: errors(index, Search()))
    timed("values to choose from", lambda: choices(index))
    row = rows[-1]
    timed("one rollout with its tokens", lambda: viewer.rollout(0, row["file"], row["row"]))
    viewer.index.close()
    if wrong:
        sys.exit("\n".join(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="rollouts of a step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the longest answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OPENRLHF_CACHE"] = f"{folder}/cache"
        run = Path(folder) / "run"
        timed("writing the run", lambda: write_run(run, options.steps, options.samples, options.tokens))
        measure(run, options.steps * options.samples)


if __name__ == "__main__":
    main()
