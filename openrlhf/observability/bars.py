"""Bars of a run and its phases on a terminal, by rich."""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from openrlhf.observability.formats import clean_text, format_duration
from openrlhf.observability.phases import Phase


class TerminalBars(Bars):
    """A bar for the run and one for each running phase, below the printed lines."""

    def __init__(self, stream: TextIO, *, transient: bool = False):
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=stream, force_terminal=True),
            refresh_per_second=4,
            transient=transient,
        )
        self._task_ids: dict[Phase, TaskID] = {}

    def add_run(self, total_steps: int | None, done: int) -> None:
        has_steps = total_steps != 0
        self._run = self.add_task(
            "step", total=total_steps, completed=done, note="", phase=None, visible=has_steps
        )
        self.start()

    def show(self, phase: Phase) -> None:
        """Shows the bar of a phase, adding it if needed."""
        if phase not in self._task_ids:
            self._task_ids[phase] = self.add_task(phase.name, total=phase.total, note="", phase=phase)
            self.start()

    def remove_phase(self, phase: Phase) -> None:
        self.remove_task(self._task_ids.pop(phase))

    def step(self, step: int, eta: float | None) -> None:
        self.update(self._run, completed=step, note=f"eta {format_duration(eta)}" if eta else "")

    def write(self, text: str) -> None:
        """Prints lines above the bars."""
        self.console.print(Text(text), highlight=False)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Updates the bars. rich calls it on each refresh, so that `advance` itself is cheap."""
        for task in self.tasks:
            if phase := task.fields["phase"]:
                task.completed = phase.done
                task.fields["note"] = clean_text(format_duration(phase.elapsed) + phase.figures_text())
        yield from super().get_renderables()
