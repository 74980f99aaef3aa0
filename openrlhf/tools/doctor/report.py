"""Writes the text of a bug report: versions, machine, command and findings, without secrets and local paths
(`openrlhf doctor --report`)."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from openrlhf.api import find_secrets, redact, run_environment
from openrlhf.tools.command_line.installation import facts
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.doctor.diagnose import describe_state, diagnose
from openrlhf.tools.doctor.record import RunRecord

_PATH = re.compile(r"(?<![\w.:/~<>-])/(?!dev/|proc/|sys/)(?:[^\s/'\"=,:;]+/)+([^\s/'\"=,:;]*)")
"""An absolute path; its group is the last part. The rest of a URL is none."""
PLACES = ("address", "cache")
"""Facts about the installation that name the machine or a folder."""
COMMAND, CONFIG = "argv.txt", "config.yaml"


def show_report(path: Path | None) -> int:
    """Prints the report of the installation, or of a run. Returns 0."""
    run = RunRecord(find_run(path)) if path else None
    print("\n".join(_lines(run)))
    return 0


def _lines(run: RunRecord | None) -> Iterator[str]:
    config, argv = (str(run.read(name)) if run else "" for name in (CONFIG, COMMAND))
    secrets = find_secrets(config, [*sys.argv, *argv.split()], os.environ)
    clean = lambda text: without_places(redact(text, secrets))
    about = run_environment()
    yield "### Installation\n\n```text"
    for fact in facts():
        if fact.name not in PLACES or fact.problem:
            yield clean(f"{fact.name}: {fact.found}" + (f" ({fact.problem})" if fact.problem else ""))
    for title, found in (("version", about["versions"]), ("variable", about["variables"])):
        yield from (clean(f"{title} {name}: {value}") for name, value in found.items())
    yield clean(f"commit: {about['git']['openrlhf']}")
    yield "```"
    if run is None:
        return
    yield "\n### Command\n\n```text"
    yield clean(argv.strip())
    yield "```\n\n### Findings\n\n```text"
    yield clean(describe_state(run))
    for finding in diagnose(run):
        yield clean(f"{finding.title} ({finding.confidence})")
        yield from (clean(f"  - {line}") for line in finding.evidence)
    yield from (clean(f"warning at step {row['step']}: {row['text']}") for row in run.warnings)
    yield "```\n\n### Configuration\n\n```yaml"
    yield clean(config.strip())
    yield "```"


def without_places(text: str) -> str:
    """Replaces absolute paths by their last part, and the machine's name."""
    host = re.escape(socket.gethostname())
    return re.sub(rf"(?<![\w-]){host}(?![\w-])", "<host>", _PATH.sub(r"<path>/\1", text))
