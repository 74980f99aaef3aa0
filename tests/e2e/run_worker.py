"""Runs a module of workers/ with its name and its arguments, which are JSON, and writes what it returns.

`main(spec)` of the module, which may be a coroutine, reports on this process; `on_rank(spec)` on a rank, in
its process group.
"""

import asyncio
import inspect
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def on_rank(spec: dict, work: Any) -> Any:
    from openrlhf.backends.distributed import init_distributed, leave_distributed

    init_distributed()
    found = work(spec)
    leave_distributed()
    return found


def run(name: str, spec: dict) -> None:
    worker = import_module(f"workers.{name}")
    if hasattr(worker, "on_rank"):
        found = on_rank(spec, worker.on_rank)
    elif inspect.iscoroutinefunction(worker.main):
        found = asyncio.run(worker.main(spec))
    else:
        found = worker.main(spec)
    Path(spec["out"], f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
