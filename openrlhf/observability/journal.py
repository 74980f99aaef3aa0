"""Journals the trajectories of every step in one Parquet file per step, in a separate thread.

`rollouts/step_000012.parquet` has training step 12, `eval_...` an evaluation, and `filtered_...` the samples
that dynamic filtering dropped. rollout_table.py defines the columns. A file is complete or absent."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.config.choices import JournalMode
from openrlhf.files import replacing
from openrlhf.observability.rollout_table import (
    ADDED,
    FACTS,
    OF_ACTIONS,
    SCHEMA,
    Visits,
    as_of_today,
    table_of_json,
    to_table,
    to_trajectories,
)
from openrlhf.observability.run_folder import JOURNAL_FILE, RENAMED_COLUMNS, reading
from openrlhf.observability.selection import best_to_worst
from openrlhf.text import Decode, decode_response
from openrlhf.types import Batch, Schedule, Trajectory

QUEUE_STEPS = 2
PATIENCE = 2.0
"""Seconds that a step waits for the journal before a message is printed."""
ROW_GROUP = 256
"""Number of samples that are converted, and read, at a time."""
SAMPLES_KEPT = 16
"""Maximum number of samples with a reward, and of failed ones, that mode `sample` keeps of a step."""
_NUM_SAMPLES = b"num_samples"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """Training data of a step's finished trajectories, in their order. Failed trajectories have none."""

    batch: Batch
    schedule: Schedule
    first_update: int
    """Number of optimizer steps of the run before this step."""

    def visits(self) -> Visits:
        visits: list[list[tuple[int, int]]] = [[] for _ in range(len(self.batch))]
        for update, ranks in enumerate(self.schedule, start=self.first_update + 1):
            for rank, indices in enumerate(ranks):
                for i in indices:
                    visits[i].append((update, rank))
        return visits


class Journal:
    """Writes trajectories in a separate thread, at most `QUEUE_STEPS` steps behind the run.

    If the disk is slower than the run, the run waits for it. After an error of the disk, nothing more is
    written and the run goes on. `report` receives a message in both cases. The next call raises any other
    error."""

    def __init__(
        self,
        rollouts: Path,
        *,
        decode: Decode | None = None,
        mode: JournalMode = "full",
        report: Callable[[str], None] = print,
    ) -> None:
        """`decode`: None leaves responses out."""
        self._rollouts, self._decode, self._mode, self._report = rollouts, decode, mode, report
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_STEPS)
        self._thread: threading.Thread | None = None
        self._is_off = mode == "off"
        self._has_waited = False
        self._error: BaseException | None = None

    def write(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        name: str = "step",
        trained: Trained | None = None,
    ) -> Path | None:
        """Queues the trajectories of a step, which must not change afterwards. Returns the path of their
        file, which replaces an existing one; None if nothing is journalled."""
        self._raise_error()
        if self._is_off:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
            self._thread.start()
        path = self._rollouts / f"{name}_{step:06d}.parquet"
        self._put(_Job(path, tuple(trajectories), trained))
        return path

    def flush(self) -> None:
        """Waits until everything is written."""
        self._jobs.join()  # bounded: by the disk; the thread survives errors
        self._raise_error()

    def close(self) -> None:
        """Waits until everything is written, then ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()  # bounded: likewise
            self._thread = None
        self._raise_error()

    def _put(self, job: "_Job") -> None:
        try:
            self._jobs.put(job, timeout=None if self._has_waited else PATIENCE)
        except queue.Full:
            self._has_waited = True
            self._report(
                f"the run waits for the disk: writing to {self._rollouts} is slower than training; "
                "--logger.rollouts sample writes less"
            )
            self._jobs.put(job)

    def _work(self) -> None:
        """Writes jobs until the journal is closed. After an error it only empties the queue, so that `write`
        never blocks."""
        while job := self._jobs.get():  # bounded: an idle thread
            try:
                if not self._is_off:
                    self._write(job)
            except OSError as error:
                self._is_off = True
                reason = error.strerror or error
                self._report(f"rollouts are no longer written: {job.path}: {reason}. Training goes on.")
            except BaseException as error:
                self._is_off, self._error = True, error
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, job: "_Job") -> None:
        """Writes one row group at a time, to limit the memory of copies."""
        ts, trained = job.trajectories, job.trained
        visits = trained.visits() if trained else ()
        chosen = range(len(ts)) if self._mode == "full" else best_worst_failed(ts)
        place = np.cumsum([t.ok for t in ts]) - 1
        schema = SCHEMA.with_metadata({_NUM_SAMPLES: str(len(ts))})
        with replacing(job.path) as file, pq.ParquetWriter(file, schema, **_ENCODING) as writer:
            for start in range(0, len(chosen), ROW_GROUP):
                rows = chosen[start : start + ROW_GROUP]
                finished = [place[i] for i in rows if ts[i].ok]
                table = to_table(
                    [ts[i] for i in rows],
                    [decode_response(ts[i], self._decode) if self._decode else None for i in rows],
                    trained.batch.select(finished) if trained else None,
                    [visits[k] for k in finished] if trained else (),
                )
                writer.write_table(table)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    path: Path
    trajectories: Sequence[Trajectory]
    trained: Trained | None


_RECORDED = "kept_log_masses", "likely_log_probs"
_NUMBERS = [f"{name}.list.element" for name in ("rollout_log_probs", *_RECORDED, *OF_ACTIONS)]
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "use_byte_stream_split": _NUMBERS,
    "use_dictionary": FACTS.names,
}


def read_journal(path: str | Path) -> list[Trajectory]:
    """Returns the trajectories of a step, from Parquet or JSON lines. A label that JSON does not know is
    returned as its repr."""
    with reading(Path(path)):
        return to_trajectories(read_table(path))


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns the table of a step with all columns, or the given ones."""
    path = Path(path)
    if path.suffix == ".jsonl":
        with reading(path):
            table = table_of_json(path)
        return table.select(columns or SCHEMA.names).replace_schema_metadata({_NUM_SAMPLES: str(len(table))})
    with reading(path), pq.ParquetFile(path) as file:
        before = {new: old for old, new in RENAMED_COLUMNS.items() if old in file.schema_arrow.names}
        written = file.schema_arrow.names
        table = as_of_today(file.read(columns and [before.get(name, name) for name in columns]), written)
        if lost := [n for n in columns or () if n not in table.column_names and n not in ADDED]:
            raise ValueError(f"it has no column {lost[0]}")
        return table.select([name for name in columns or table.column_names if name in table.column_names])


def num_samples(table: pa.Table) -> int:
    """Returns the number of samples of a table's step, including those that the journal left out."""
    return int((table.schema.metadata or {}).get(_NUM_SAMPLES, len(table)))


def read_rows(path: str | Path, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows of a step, without reading the whole file."""
    path = Path(path)
    if path.suffix == ".jsonl":
        return read_table(path).take(list(indices)).to_pylist()
    with reading(path), pq.ParquetFile(path) as file:
        read_group = cache(file.read_row_group)
        size = file.metadata.row_group(0).num_rows if indices else 1
        written = file.schema_arrow.names
        rows = (as_of_today(read_group(i // size).slice(i % size, 1), written) for i in indices)
        return [row.to_pylist()[0] for row in rows]


def journal_steps(rollouts: Path, name: str = "step") -> dict[int, Path]:
    """Returns step -> file, in the order of steps."""
    files = [(JOURNAL_FILE.fullmatch(path.name), path) for path in sorted(rollouts.glob("*"))]
    return dict(sorted((int(m["step"]), path) for m, path in files if m and m["name"] == name))


def best_worst_failed(trajectories: Sequence[Trajectory]) -> list[int]:
    """Returns the indices of the trajectories that mode `sample` keeps, in order."""
    rewards = [t.reward for t in trajectories]
    failed = [i for i, reward in enumerate(rewards) if reward is None][:SAMPLES_KEPT]
    return sorted({*best_to_worst(rewards, SAMPLES_KEPT), *failed})
