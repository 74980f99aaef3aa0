"""Ranks of tests, forked from a process without threads that has already done imports of ten seconds.

tests/e2e/test_sft.py starts commands as users do, with every launcher.
"""

import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.backends.distributed import free_port

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["openrlhf.loop.supervised.run", "openrlhf.training.precompute", "transformers.optimization", "datasets"]
)


def port_for_later() -> int:
    """Returns the number of a free TCP port that stays free for a while: it is below those that the system
    gives to connections, and above those of Ray's workers."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port
    raise RuntimeError("none of 100 ports is free")


def run_ranks(command: Sequence[str], num_ranks: int = 1, *, log: Path, timeout: float = 300) -> None:
    """Runs a file or a module with its arguments on `num_ranks` ranks of one process group; their output goes
    to `log`.

    Raises AssertionError with the end of `log` if a rank fails.
    """
    group = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    ranks = []
    for rank in range(num_ranks):
        place = group | {"RANK": rank, "LOCAL_RANK": rank} if num_ranks > 1 else {}
        environment = dict(os.environ) | {name: str(value) for name, value in place.items()}
        ranks.append(FORKSERVER.Process(target=_be, args=(list(command), environment, log)))
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    while any(process.exitcode is None for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):  # the other ranks would wait for the failed one
            break
        ranks[0].join(0.05)
        time.sleep(0.02)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [0] * num_ranks, f"{command} ended with {codes}:\n{log.read_text()[-4000:]}"


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Starts a file or a module with its arguments in one process, with further environment variables; its
    output goes to `log`. Returns the process."""
    variables = dict(os.environ) | dict(environment or {})
    process = FORKSERVER.Process(target=_be, args=(list(command), variables, log))
    process.start()
    return process


def _be(command: list[str], environment: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    program, *sys.argv[1:] = command
    sys.argv[0] = program
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
