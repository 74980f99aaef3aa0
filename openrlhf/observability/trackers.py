"""Where metrics go: always to `metrics.jsonl` in the run folder, and to whatever else a team uses.

trackers = Trackers(JsonlTracker(folder.metrics_path), [TensorBoardTracker(directory)])
trackers.log(12, {"rollout/reward_mean": 0.5})
"""

import json
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from openrlhf.files import write_atomically
from openrlhf.observability.run_folder import REDACTED, RunFolder, read_jsonl, redact, to_json
from openrlhf.types import Metrics

logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3
QUEUE_ROWS = 1000
CLOSE_SECONDS = 60.0


class Tracker(Protocol):
    def log(self, step: int, metrics: Metrics) -> None:
        """Numbers of one step; once per step."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows of text and numbers, such as sampled answers."""

    def close(self) -> None:
        """Write out what is pending. Nothing is logged after it."""


class Trackers:
    """The record and its mirrors. What fails in the record is raised: it is the source of truth.

    A mirror has a thread of its own, and neither stops nor delays training: one that fails 3 times in a row
    is switched off with a warning, and rows that a slow one cannot take are dropped and counted."""

    def __init__(self, record: "JsonlTracker", mirrors: Sequence[Tracker] = ()):
        self._record = record
        self._mirrors = [_Mirror(tracker) for tracker in mirrors]

    def log(self, step: int, metrics: Metrics) -> None:
        metrics = {name: float(value) for name, value in metrics.items()}
        self._record.log(step, metrics)
        for mirror in self._mirrors:
            mirror.put(lambda tracker: tracker.log(step, metrics))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        rows = [list(row) for row in rows]
        for mirror in self._mirrors:
            mirror.put(lambda tracker: tracker.table(step, name, columns, rows))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait at most `timeout` seconds for each mirror."""
        self._record.close()
        for mirror in self._mirrors:
            mirror.close(timeout)


class JsonlTracker:
    """One line per step, `{"step": 12, "rollout/reward_mean": 0.5}`, on disk when `log` returns.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity".
    A half-written last line of a killed run is removed on opening.
    """

    def __init__(self, path: Path):
        self._file = _open_to_append(path)

    def log(self, step: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        # One write, so that a kill leaves at most one half line.
        self._file.write((to_json({"step": step} | values) + "\n").encode())
        self._file.flush()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Nothing: the rollouts that tables show a part of are whole in the journal."""

    def close(self) -> None:
        self._file.close()


RENAMED = {"timing/score": "timing/logprobs", "memory/score_gb": "memory/logprobs_gb"}
"""Metrics of earlier versions, and their names today."""


def read_metrics(path: Path) -> dict[int, Metrics]:
    """Step -> metrics, by the names of this version. Rows of the same step are merged; NaN and infinities are
    numbers again."""
    steps: dict[int, Metrics] = {}
    for row in read_jsonl(path):
        step = row.pop("step")
        steps.setdefault(step, {}).update(
            {RENAMED.get(name, name): float(value) for name, value in row.items()}
        )
    return steps


class TensorBoardTracker:
    """Event files in `directory`. After a resume from `resume_step`, TensorBoard hides what came after it."""

    def __init__(self, directory: str | Path, *, resume_step: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--logger.tensorboard_dir {directory} needs a package that is not installed ({error}).\n"
                "Run `pip install tensorboard`, or leave the flag out: metrics.jsonl is always written."
            ) from None
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = [_markdown_row(columns), _markdown_row(["---"] * len(columns)), *map(_markdown_row, rows)]
        self._writer.add_text(name, "\n".join(lines), step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. `key` is an API key, or True to use WANDB_API_KEY or an earlier `wandb login`.

    The run keeps its identity over resumes of `folder`. WANDB_MODE=offline works. When W&B cannot be reached
    or refuses the key, the run is recorded offline under `folder` with a warning; `wandb sync` uploads it.
    """

    def __init__(
        self,
        key: str | bool,
        *,
        folder: RunFolder,
        project: str,
        run_name: str,
        org: str | None = None,
        group: str | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--logger.wandb.key needs a package that is not installed ({error}).\n"
                'Run `pip install "openrlhf[wandb]"`, or leave the flag out: metrics.jsonl is always written.'
            ) from None
        self._wandb = wandb
        # The redacted key of a saved config.yaml means: the one of whoever runs it.
        from_environment = key in (True, "True", "true", REDACTED)

        def start(mode: str | None):
            return wandb.init(
                mode=mode,
                dir=folder.path,
                id=_wandb_id(folder.path / "wandb_id.txt"),
                resume="allow",
                project=project,
                entity=org,
                group=group,
                name=run_name,
                config=yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8")),
                # As a setting the key is in memory only; `wandb.login` would write it to ~/.netrc.
                # Without x_disable_meta, W&B uploads the command line, which may hold secrets.
                settings=wandb.Settings(
                    api_key=None if from_environment else key, x_disable_meta=True, console="off", silent=True
                ),
            )

        try:
            self._run = start(mode=None)
        except wandb.Error as error:
            first_line = redact(str(error).strip().partition("\n")[0], {str(key)})
            logger.warning(
                "W&B is not available (%s); recording offline in %s/wandb", first_line, folder.path
            )
            wandb.teardown()  # Else its service still holds the id of the run that did not start.
            self._run = start(mode="offline")
        # An own step axis, because W&B drops rows whose built-in step is not larger than the last.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self._run.log({"step": step, name: table})

    def close(self) -> None:
        self._run.finish()


class _Mirror:
    """A tracker behind a queue and a thread."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._name = type(tracker).__name__.removesuffix("Tracker")
        self._jobs: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_ROWS)
        self._off = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[Tracker], None]) -> None:
        if self._off:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout: float) -> None:
        try:
            self._jobs.put(None, timeout=timeout)
        except queue.Full:
            self._dropped += self._jobs.qsize()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("%s did not finish in %.0f s; metrics.jsonl is complete", self._name, timeout)
        if self._dropped:
            logger.warning("%s was too slow for %d rows; metrics.jsonl has all", self._name, self._dropped)

    def _work(self) -> None:
        failures = 0
        while job := self._jobs.get():
            if self._off:
                continue
            # A mirror talks to disks, networks and services; whatever it raises, training goes on.
            try:
                job(self._tracker)
                failures = 0
            except Exception as error:
                failures += 1
                if failures == FAILURES_ALLOWED:
                    self._off = True
                    logger.warning(
                        "%s is off after %d failures in a row (%s: %s); metrics.jsonl has everything",
                        self._name, failures, type(error).__name__, " ".join(str(error).split())[:200],
                    )  # fmt: skip
        try:
            self._tracker.close()
        except Exception as error:
            logger.warning("%s did not close (%s: %s)", self._name, type(error).__name__, error)


def _open_to_append(path: Path):
    """Open for appending, after the last complete line."""
    file = open(path, "ab+")  # noqa: SIM115
    size = file.seek(0, 2)
    tail_start = max(0, size - 1)
    file.seek(tail_start)
    if size and file.read(1) != b"\n":
        file.seek(0)
        complete, _, tail = file.read().rpartition(b"\n")
        try:
            json.loads(tail)
            file.write(b"\n")
        except ValueError:
            file.truncate(len(complete) + (1 if complete else 0))
        file.flush()
    return file


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = (str(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    return "| " + " | ".join("<br>".join(text.splitlines()) for text in texts) + " |"


def _wandb_id(path: Path) -> str:
    if not path.exists():
        write_atomically(path, [uuid.uuid4().hex[:12]])
    return path.read_text()
