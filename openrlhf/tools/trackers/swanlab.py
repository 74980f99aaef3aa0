"""The tracker for SwanLab."""

import logging
import uuid

from openrlhf.api import Metrics, TrackedRun, Tracker, first_line

logger = logging.getLogger(__name__)


class SwanLabTracker(Tracker):
    """Records a run in SwanLab, with the project, group and name of `logger.wandb`.

    It uses SWANLAB_API_KEY or an earlier `swanlab login`. SWANLAB_MODE=offline works. If SwanLab cannot be
    reached, the run is recorded offline in its folder, with a warning; `swanlab sync` uploads it. A resumed
    run continues its SwanLab run."""

    name = "swanlab"
    package = "swanlab"
    remedy = 'pip install "openrlhf[swanlab]"'

    def open(self, run: TrackedRun) -> None:
        super().open(run)
        swanlab, flags, folder = self.library(), run.logger.wandb, run.folder
        options = {
            "project": flags.project,
            "workspace": flags.org,
            "group": flags.group,
            "name": flags.run_name,
            "id": self.kept_id(lambda: uuid.uuid4().hex[:21]),
            "resume": "allow",
            "config": folder.read_config(),
            "log_dir": str(folder.path / "swanlab"),
            # Asks nothing, and does not record the command line, which may hold secrets.
            "settings": swanlab.Settings(interactive=False, probe={"runtime": False}),
        }
        try:
            self._run = swanlab.init(**options)
        except Exception as error:
            reason = first_line(error)
            logger.warning("SwanLab is not available (%s); recording offline in %s", reason, folder.path)
            self._run = swanlab.init(**options, mode="offline")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
