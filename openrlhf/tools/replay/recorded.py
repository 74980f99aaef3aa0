"""Reads flags, metrics, rollouts and checkpoints of a run from its folder."""

import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from openrlhf.api import FINGERPRINT_BUT_GENERATION as BUT_GENERATION
from openrlhf.api import ORIGIN_FILE as ORIGIN
from openrlhf.api import PPO, ErrorCode, UsageError
from openrlhf.api import flat_settings as flat
from openrlhf.api import reading_run as reading
from openrlhf.tools.command_line.run_files import MEASURED
from openrlhf.tools.command_line.runs import PlacedRun

_MODULE = re.compile(r"openrlhf\.cli\.train_(\w+)")
_TAG = re.compile(r"global_step(\d+)")


class RecordedRun(PlacedRun):
    """A run with what a replay needs of it."""

    @cached_property
    def flags(self) -> dict[str, Any]:
        """Values of all flags by key. Raises UsageError if the folder has no configuration."""
        if not (config := self.read_config()):
            text = f"has no configuration in config.yaml; {self.runs_inside('config.yaml')}"
            raise UsageError(ErrorCode.NOT_FOUND, text, value=self.path)
        return flat(config)

    @property
    def command(self) -> str:
        """Name of the command, as in `openrlhf NAME`; "" if argv.txt does not name it."""
        found = _MODULE.findall(self.read("argv.txt"))
        return found[-1].removesuffix("_ray") if found else ""

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and variables by name; empty if the folder has none."""
        return self.read("env.json", lambda text: flat(json.loads(text or "{}")))

    @property
    def num_ranks(self) -> int:
        """Number of processes in which the command was started; 1 for reinforcement learning."""
        return 1 if self.command == PPO.name else int(self.environment.get("variables.WORLD_SIZE", 1))

    @cached_property
    def measured(self) -> dict[int, dict[str, Any]]:
        """Metrics of each logged step, except those with a prefix in `MEASURED`."""
        return {
            row["step"]: {k: v for k, v in row.items() if k != "step" and not k.startswith(MEASURED)}
            for row in self.rows
        }

    @property
    def steps(self) -> list[int]:
        """Steps with the records that a replay needs: rollouts in reinforcement learning, else metrics."""
        return sorted(
            step for step in (self.rollouts() if self.command == PPO.name else self.measured) if step > 0
        )

    def checkpoints(self) -> dict[int, dict[str, Path]]:
        """Returns step -> model (`model`; in RL `actor`, `critic`) -> folder of the checkpoint."""
        found: dict[int, dict[str, Path]] = {}
        for model, place in (("model", ""), ("actor", "_actor"), ("critic", "_critic")):
            for folder in (self.checkpoint_folder / place).glob("global_step*"):
                if folder.is_dir() and (match := _TAG.fullmatch(folder.name)):
                    found.setdefault(int(match[1]), {})[model] = folder
        return dict(sorted(found.items()))

    @property
    def contents(self) -> dict[str, str]:
        """Name -> checksum of data and models in the last checkpoint; empty if there is none."""
        for models in reversed(self.checkpoints().values()):
            for folder in models.values():
                with suppress(FileNotFoundError), reading(file := folder / ORIGIN):
                    found = json.loads(file.read_bytes())["origin"]["contents"]
                    return {k: found[k] for k in found if not k.endswith(BUT_GENERATION)}
        return {}
