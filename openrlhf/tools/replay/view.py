"""Prints the results of `openrlhf replay` and `openrlhf bisect`."""

from collections.abc import Sequence
from typing import TextIO

from rich.text import Text

from openrlhf.api import clean_text, format_number
from openrlhf.tools.command_line.terminal import build_console, build_table, say
from openrlhf.tools.replay.compare import Bisection, Settings, Stage, describe_cause
from openrlhf.tools.replay.differences import Compared, shown
from openrlhf.tools.replay.rerun import Replayed, Rerun

MOST_ROWS = 30
"""Maximum number of differing quantities in a table."""
MOST_STAGES = 4
"""Maximum number of differing records that are shown as tables."""


class Screen:
    """The output of a comparison, on a terminal or in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._console = build_console(stream)

    def say(self, text: str, style: str = "") -> None:
        say(self._console, text, style)

    def stage(self, stage: Stage) -> None:
        title, differing = f"{stage.name} of step {stage.step}", stage.differing
        columns = "quantity", "differs in", "largest", "first difference"
        made = build_table(title, *columns, right=("largest",))
        for compared in differing[:MOST_ROWS]:
            largest = "" if compared.largest is None else format_number(compared.largest)
            cells = (compared.quantity, compared.number, largest, compared.first)
            made.add_row(*(Text(clean_text(cell)) for cell in cells))
        if differing:
            self._console.print(made)
        else:
            self.say(f"\n{title}")
        if len(differing) > MOST_ROWS:
            self.say(f"and {len(differing) - MOST_ROWS} more quantities")
        if equal := [compared for compared in stage.found if compared.is_equal]:
            self.say(f"equal: {_quantities(equal)}")

    def bisection(self, result: Bisection, names: tuple[str, str]) -> None:
        """Prints the result of comparing two runs. `names`: their folders."""
        self.say(f"first run   {names[0]}\nsecond run  {names[1]}")
        self.settings(result.settings)
        self.say(f"\nequal: {_summary(result.equal) or 'no record'}")
        for record, steps in result.alone.items():
            self.say(f"only in the {record}: {_steps(steps)}", "yellow")
        if result.first is None:
            self.say("\nno difference in what both runs recorded", "bold green")
            return
        first = result.first.differing[0]
        place = f"step {result.first.step}, {result.first.name}, {first.quantity}: {first.first}"
        self.say(f"\nfirst difference: {place}", "bold red")
        if cause := describe_cause(result.first):
            self.say(f"meaning: {cause}")
        self.stage(result.first)
        if result.later is not None:
            self.stage(result.later)

    def replay(self, rerun: Rerun, result: Replayed) -> None:
        self.say(f"{rerun.run.path}: step {rerun.step} computed again, from {rerun.beginning}")
        equal = [stage for stage in result.stages if not stage.differing]
        self.say(f"\nequal bit for bit: {_summary(equal) or 'nothing'}")
        for stage in equal:
            if stage.step == rerun.step:
                self.say(f"  {stage.name}: {_quantities(stage.found)}")
        differing = [stage for stage in result.stages if stage.differing]
        if differing:
            first = differing[0].differing[0]
            place = f"step {differing[0].step}, {differing[0].name}, {first.quantity}: {first.first}"
            self.say(f"\nfirst difference (recorded | computed): {place}", "bold red")
            for stage in differing[:MOST_STAGES]:
                self.stage(stage)
            if len(differing) > MOST_STAGES:
                self.say(f"\nlater records that differ: {_summary(differing[MOST_STAGES:])}")
        for reason in result.not_compared:
            self.say(f"not compared: {reason}")

    def settings(self, settings: Settings) -> None:
        titles = {
            "flags and data that determine what the run learns": settings.learned,
            "other flags (some of them change the last bits)": settings.other,
            "environment": settings.environment,
        }
        if not any(titles.values()):
            self.say("\nflags and environment: equal")
        for title, changed in titles.items():
            made = build_table(title, "", "first run", "second run")
            for name, values in changed.items():
                made.add_row(*(Text(clean_text(cell)) for cell in (name, *map(shown, values))))
            if changed:
                self._console.print(made)


def _summary(stages: Sequence[Stage]) -> str:
    steps: dict[str, list[int]] = {}
    for stage in stages:
        steps.setdefault(stage.name, []).append(stage.step)
    return "; ".join(f"{name} of {_steps(own)}" for name, own in steps.items())


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps))}"


def _quantities(found: Sequence[Compared]) -> str:
    """Lists quantities by name; of more than MOST_ROWS their number, the first and the last."""
    names = [compared.quantity for compared in found]
    return ", ".join(names) if len(names) <= MOST_ROWS else f"{len(names)}, from {names[0]} to {names[-1]}"
