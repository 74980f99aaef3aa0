"""Files of a run of the kit: at most five, each below 16 MiB. Standard library only."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from gpukit.stage import Verdict, shown

HEAD, TAIL = 96 * 2**10, 288 * 2**10
"""Bytes that are kept of the beginning and the end of a stage's log: 40 stages fit in 16 MiB."""


class Report:
    """Writes `gpu_report.json`, `gpu_report.md` and `logs.txt` after every stage, `stacks.txt` of stopped
    stages, and `under_way.log` of the running one. A kill loses only the verdict of the running stage."""

    def __init__(self, folder: Path, command: list[str], *, rehearsal: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.verdicts = folder, list[Verdict]()
        self.head = {
            "command": " ".join(command),
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "rehearsal": rehearsal,
        }
        self.under_way = folder / "under_way.log"
        for name in ("logs.txt", "stacks.txt", "under_way.log"):
            (folder / name).unlink(missing_ok=True)

    def begin(self) -> Path:
        """Returns the log of the stage that begins."""
        self.under_way.write_bytes(b"")
        return self.under_way

    def add(self, verdict: Verdict, stacks: str = "") -> None:
        self.verdicts.append(verdict)
        if self.under_way.exists():
            self._append("logs.txt", verdict.stage, _middle_cut(self.under_way.read_bytes()))
            self.under_way.unlink()
        if stacks:
            self._append("stacks.txt", verdict.stage, _middle_cut(stacks.encode()))
        content = self.head | {"stages": [asdict(verdict) for verdict in self.verdicts]}
        write_whole(self.folder / "gpu_report.json", json.dumps(content, indent=2) + "\n")
        write_whole(self.folder / "gpu_report.md", self.page())

    def page(self) -> str:
        """Returns the verdicts as a table of Markdown."""
        lines = [
            "# GPU report\n",
            f"`{self.head['command']}`, {self.head['date']}, Python {self.head['python']}"
            + ", **rehearsed on a CPU: its figures mean nothing**" * self.head["rehearsal"],
            "\n| stage | outcome | seconds | figures |\n|---|---|---|---|",
        ]
        for verdict in self.verdicts:
            figures = "<br>".join(f"{name}: {shown(value)}" for name, value in verdict.figures.items())
            said = "<br>".join(part for part in (verdict.reason, figures) if part).replace("|", "\\|")
            lines.append(f"| `{verdict.stage}` | {verdict.outcome} | {verdict.seconds:.1f} | {said} |")
        return "\n".join(lines) + "\n"

    def _append(self, name: str, stage: str, content: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(f"\n===== {stage} =====\n".encode() + content)


def _middle_cut(content: bytes) -> bytes:
    if len(content) <= HEAD + TAIL:
        return content
    return content[:HEAD] + b"\n[cut]\n" + content[-TAIL:]


def write_whole(path: Path, text: str) -> None:
    """Writes a file that a reader sees whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
