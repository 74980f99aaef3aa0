"""A phase of a long operation, and the lines about it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openrlhf.observability.formats import format_duration, format_number


@dataclass(eq=False, slots=True)
class Phase:
    """Progress and elapsed time of a part of a step."""

    name: str
    total: int | None
    done: int = 0
    figures: dict[str, float | str] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    def advance(self, count: int = 1, **figures: float | str) -> None:
        """Adds `count` finished parts of `total`. `figures` are shown until they are replaced."""
        with self._lock:
            self.done += count
            self.figures = self.figures | figures

    def line(self) -> str:
        of_total = f"/{self.total:,}" if self.total else ""
        count = f" {self.done:,}{of_total}" if self.total or self.done else ""
        return f"{self.name}{count} {format_duration(self.elapsed)}{self.figures_text()}"

    def figures_text(self) -> str:
        return "".join(
            f" {name} {value if isinstance(value, str) else format_number(value)}"
            for name, value in self.figures.items()
        )
