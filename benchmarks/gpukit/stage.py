"""Records of the kit. Standard library only: the process that watches the stages imports no torch."""

from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Setting:
    """Device and shapes of a stage's computations."""

    rehearsal: bool = False
    """Tiny shapes on a CPU."""

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def size(self, real: Any, rehearsed: Any) -> Any:
        return rehearsed if self.rehearsal else real


@dataclass(frozen=True, kw_only=True)
class Stage:
    shows: str
    """Line of the stage in `--help`."""
    work: str
    """`module:function`, called with the setting and `options` in the stage's own process. It returns
    figures, or raises AssertionError if something is wrong."""
    options: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    """Packages that are imported before the work starts; the stage is skipped if one is not installed."""
    model: str = ""
    """Folder of a model that `openrlhf fetch` wrote, relative to the project; the stage is skipped without
    it."""
    gpus: int = 1
    seconds: float = 60
    """Expected seconds on an H100. The stage starts only if the budget has as many left."""
    limit: float = 300
    """Seconds after which the stage is stopped."""
    rehearsed: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    stage: str
    outcome: str
    """One of pass, fail and skip."""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in self.figures.items())
        said = "; ".join(part for part in (self.reason, figures) if part)
        return f"{self.outcome.upper():5}{self.stage:24}{self.seconds:6.1f} s  {said}"


def shown(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
