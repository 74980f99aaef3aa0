"""The tracker for Weights & Biases."""

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.errors import REDACTED, ErrorCode, UsageError
from openrlhf.observability.run_folder import redact
from openrlhf.observability.trackers.base import TrackedRun, Tracker
from openrlhf.types import Metrics

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Records a run in Weights & Biases, with the settings of `logger.wandb`.

    Without `logger.wandb.key` it logs in with WANDB_API_KEY or an earlier `wandb login`. A resumed run
    continues its W&B run, which keeps the rows of steps after the restored one: W&B rewinds no run with a
    step axis of its own. WANDB_MODE=offline works. If W&B cannot be reached or refuses the key, the run is
    recorded offline in its folder, with a warning; `wandb sync` uploads it."""

    name = "wandb"
    package = "wandb"
    remedy = 'pip install "openrlhf[wandb]"'

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        self._wandb = wandb = self.library()
        flags, folder = run.logger.wandb, run.folder
        # A saved config.yaml has REDACTED instead of a key; its user's own key is used then.
        from_environment = flags.key in (None, "True", "true", REDACTED)
        key = None if from_environment else read_key(str(flags.key))

        def start(mode: str | None):
            return wandb.init(
                mode=mode,
                dir=folder.path,
                id=self.kept_id(lambda: uuid.uuid4().hex[:12]),
                resume="allow",
                project=flags.project,
                entity=flags.org,
                group=flags.group,
                name=flags.run_name,
                config=folder.read_config(),
                # As a setting the key is in memory only; `wandb.login` would write it to ~/.netrc.
                # Without x_disable_meta, W&B uploads the command line, which may hold secrets.
                settings=wandb.Settings(api_key=key, x_disable_meta=True, console="off", silent=True),
            )

        try:
            self._run = start(mode=None)
        except wandb.Error as error:
            first_line = redact(str(error).strip().partition("\n")[0], {key} if key else set())
            logger.warning(
                "W&B is not available (%s); recording offline in %s/wandb", first_line, folder.path
            )
            wandb.teardown()  # otherwise its service still holds the id of the run that did not start
            self._run = start(mode="offline")
        # A step axis of our own, because W&B drops rows whose built-in step is not larger than the last.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, "step": step})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self._run.log({"step": step, name: table})

    def close(self) -> None:
        self._run.finish()


def read_key(value: str) -> str:
    """Returns the key that a flag gives: the value itself, or for `@FILE` the content of the file. Raises
    UsageError if the file cannot be read."""
    if not value.startswith("@"):
        return value
    file = Path(value[1:]).expanduser()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        text = f"the key cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(ErrorCode.NOT_FOUND, text, flag="--logger.wandb.key", value=value) from error
