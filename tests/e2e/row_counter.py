"""A hook of supervised training: adds the number of packed rows of each step that rank 0 had."""

from collections.abc import Sequence
from typing import Any

import openrlhf as rl


class RowCounter(rl.Hook):
    def before_step(self, step: int, rows: Sequence[Any], objective: Any) -> None:
        self.seen = step, len(rows)

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        number, count = self.seen
        assert number == step
        metrics["packed_rows"] = float(count)
