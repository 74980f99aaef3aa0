"""Finds calls that may wait for ever (for threads, processes, queues, locks, futures and Ray); run by `make
lint`.

python tools/check_waits.py openrlhf

Each such call needs a timeout, or a comment that says what ends it: `# bounded: REASON` on one of its lines,
or `# bounded .result(): REASON` alone on a line for all calls of this kind in the file. Collective operations
are not checked, because their process group has a timeout (--train.rank_timeout)."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

METHODS = {"result", "wait", "join", "get", "acquire", "communicate"}
"""Methods that may wait for ever if they are called without arguments."""
FUNCTIONS = {
    *("ray.get", "ray.wait", "as_completed", "wait", "asyncio.wait", "asyncio.wait_for"),
    *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "os.wait"),
    "dist.init_process_group",
}
"""Functions that may wait for ever without the keyword `timeout`."""
FOR_LINE = re.compile(r"# bounded: \S")
FOR_FILE = re.compile(r"^# bounded (\S+): \S", re.MULTILINE)


def main() -> None:
    files = (file for folder in sys.argv[1:] for file in sorted(Path(folder).rglob("*.py")))
    problems = [
        f"{file}:{line}: {kind} may wait for ever: pass a timeout, or add `# bounded: REASON`"
        for file in files
        for line, kind in endless_waits(file.read_text())
    ]
    if problems:
        sys.exit("\n".join(problems))


def endless_waits(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and kind of each call without a timeout and without a comment. The kind of a method is
    written `.result()`, that of a function `ray.get`."""
    lines, allowed = source.splitlines(), set(FOR_FILE.findall(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (kind := _kind(node)) and kind not in allowed:
            own = lines[node.lineno - 1 : node.end_lineno]
            if not any(FOR_LINE.search(line) for line in own):
                yield node.lineno, kind


def _kind(call: ast.Call) -> str | None:
    """Returns the kind of a call that may wait for ever; None for other calls."""
    name = ast.unparse(call.func)
    if name in FUNCTIONS:
        return None if any(keyword.arg == "timeout" for keyword in call.keywords) else name
    if (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in METHODS
        and not (call.args or call.keywords)
    ):
        return f".{call.func.attr}()"
    return None


if __name__ == "__main__":
    main()
