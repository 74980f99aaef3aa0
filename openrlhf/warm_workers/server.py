"""The server that imports the libraries of workers, and forks workers from itself.

The module is a program, too: python -m openrlhf.warm_workers.server INTERPRETER NUMBER MODULES. NUMBER is
that of an open socket, to which the program interpreter.py sends its requests.
"""

import argparse
import fcntl
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import popen_spawn_posix, spawn
from pathlib import Path
from typing import Any

import numpy
import torch

import openrlhf
from openrlhf import heap
from openrlhf.files import socket_folder
from openrlhf.warm_workers import interpreter as interpreter_program
from openrlhf.warm_workers.interpreter import NUMBER

ALWAYS = ("openrlhf.training.trained_worker", "openrlhf.rollout.worker")
"""Modules that every run's workers import."""

BACKENDS = {
    "deepspeed": ["openrlhf.backends.deepspeed.engine"],
    "torch": ["openrlhf.backends.torch.engine"],
    "transformers": ["openrlhf.backends.transformers.engine"],
    "vllm": ["setproctitle", "openrlhf.backends.vllm.engine", "openrlhf.backends.vllm.weight_receiver"],
}
"""Modules of `--train.backend` and `--rollout.engine`. None of the modules imports Ray, which keeps the
variables of the process that imports it, or starts a thread, which a fork would lose."""

READ_AT_IMPORT = {
    "OMP_NUM_THREADS": "1",  # Ray's default for workers
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow's allocator, which a fork would lose
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Default variables of ranks and engines that libraries keep when they are imported, and which cannot be set
later."""

PATIENCE = 60
"""Maximum seconds for receiving a request, and for the server's end."""

MOST_FILES = 250
"""Number of open files that one message of a socket can carry."""


class WarmServer:
    """The server of this process's cluster. It ends with this process, even if that is killed."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the server, which imports `modules` in the background. `variables`: defaults of all
        workers."""
        folder = Path(tempfile.mkdtemp(prefix="openrlhf-", dir=socket_folder()))  # no other user can enter it
        self.interpreter = folder / "python"
        """Program that Ray starts instead of Python."""
        asks = [sys.executable, "-I", "-S", interpreter_program.__file__, sys.executable, f"{folder}/socket"]
        self.interpreter.write_text(f'#!/bin/sh\nexec {shlex.join(asks)} "$@"\n')
        self.interpreter.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen(128)
            own = [str(self.interpreter), str(listener.fileno())]
            path = [str(Path(openrlhf.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            self.process = subprocess.Popen(
                # -P: files of the current folder are no modules
                [sys.executable, "-P", "-m", __name__, *own, *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**READ_AT_IMPORT, **variables, **os.environ, "PYTHONPATH": os.pathsep.join(path)},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @contextmanager
    def starts_workers(self) -> Iterator[None]:
        """A context in which Ray takes the program for the interpreter of its workers, unless the folder of
        temporary files is mounted without the right to execute them."""
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")  # the first ones wait for imports
        own = sys.executable
        if os.access(self.interpreter, os.X_OK):
            sys.executable = str(self.interpreter)
        try:
            yield
        finally:
            sys.executable = own

    def stop(self) -> None:
        """Ends the server and the processes that it forked. One that has not ended in time, on a machine that
        swaps, is killed: the run's own error, if it has one, is what its user reads."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.terminate()  # ends the imports; after them the server ignores it
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()  # bounded: SIGKILL has ended it
        shutil.rmtree(self.interpreter.parent, ignore_errors=True)


def start(backends: Sequence[str], variables: Mapping[str, str]) -> WarmServer | None:
    """Starts a server for the workers of a run with these backends; all known ones if there are none. Returns
    None if the variable OPENRLHF_WARM_WORKERS is 0."""
    if os.environ.get("OPENRLHF_WARM_WORKERS") == "0":
        return None
    return WarmServer(list_modules(backends or tuple(BACKENDS)), variables)


def list_modules(backends: Sequence[str]) -> list[str]:
    """Returns the modules that the workers of a run with these backends import."""
    return [*ALWAYS, *(module for name in backends for module in BACKENDS.get(name, ()))]


def serve(interpreter: str, listener: socket.socket, modules: Sequence[str]) -> Callable[[], None]:
    """Answers requests until standard input closes. Returns in each forked process, with the function to run
    there, and at the end in the server, with one that removes its folder."""
    preload(modules)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ, ("end", 0))
    waiting.register(listener, selectors.EVENT_READ, ("request", 0))
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in waiting.select():
            event, pid = key.data
            if event == "end":
                for worker in clients:
                    os.kill(worker, signal.SIGKILL)
                return lambda: shutil.rmtree(Path(interpreter).parent, ignore_errors=True)
            if event == "request":
                client, _ = listener.accept()
                client.settimeout(PATIENCE)
                if (received := receive(client)) is None:
                    continue
                request, files = received
                if not (pid := os.fork()):
                    for inherited in (waiting, listener, client, *clients.values()):
                        inherited.close()
                    return lambda request=request, files=files: become(interpreter, request, files)
                close(files)
                send(client, pid)
                clients[pid] = client
                waiting.register(client, selectors.EVENT_READ, ("left", pid))
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", pid))
            elif event == "left" and pid in clients:
                waiting.unregister(key.fileobj)
                os.kill(pid, signal.SIGKILL)  # the number is still its own, since nobody waited for it
            elif event == "ended":
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                client = clients.pop(pid)
                with suppress(KeyError):
                    waiting.unregister(client)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                send(client, status if status >= 0 else 128 - status)
                client.close()


def preload(modules: Sequence[str]) -> None:
    """Imports modules; a worker that needs a missing library reports it."""
    heap.grow()
    for name in modules:
        with suppress(ImportError):
            import_module(name)


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns a request and its open files. Returns None, and closes the connection, if the program that
    asks was killed meanwhile."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(client, NUMBER.size, MOST_FILES)
        with client.makefile("rb") as stream:
            return json.loads(stream.read(*NUMBER.unpack(head))), files
    except (OSError, struct.error, ValueError):
        close(files)
        client.close()
        return None


def send(client: socket.socket, number: int) -> None:
    """Sends a number to the program that asked, if it is still there."""
    with suppress(OSError):
        client.sendall(NUMBER.pack(number))


def close(files: Sequence[int]) -> None:
    for number in files:
        os.close(number)


def become(interpreter: str, request: Mapping[str, Any], files: list[int]) -> None:
    """Turns this forked process into the requested one, and runs it."""
    command, variables = request["command"], request["environment"]
    is_worker = "-c" not in command
    if is_worker:
        command, more = worker_command(command)
        variables = variables | more
    elif titles := sys.modules.get("setproctitle"):
        titles.getproctitle()  # finds the place of vLLM's title, which it could not with other variables
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray kills the whole group of a worker
    take_files(files, request["files"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.chdir(request["folder"])
    take_environment(variables)
    if is_worker:
        fork_cores(interpreter)
        sys.argv = command
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")
    else:
        os.getppid = lambda: request["parent"]  # its parent is not the one that spawned it
        place = command.index("-c")
        sys.argv = ["-c", *command[place + 2 :]]
        exec(command[place + 1], {"__name__": "__main__"})


def fork_cores(interpreter: str) -> None:
    """Makes vLLM's cores, which this process spawns with multiprocessing, start with the program
    `interpreter`. Other processes, such as those of reward functions, need few imports."""
    popen: Any = popen_spawn_posix.Popen
    launch, own, threads = popen._launch, spawn.get_executable, set[int]()

    def launch_core(self: Any, process: Any) -> None:
        is_core = process.name.startswith("EngineCore")
        threads.update([threading.get_ident()] if is_core else [])
        try:
            launch(self, process)
        finally:
            threads.discard(threading.get_ident())

    executable: Any = lambda: os.fsencode(interpreter) if threading.get_ident() in threads else own()
    spawn.get_executable, popen._launch = executable, launch_core


def worker_command(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a worker, and the variables of its runtime environment. Ray's `setup_worker.py`
    would set these and start the interpreter a second time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(command[1:])
    variables = json.loads(known.serialized_runtime_env_context).get("env_vars") or {}
    return rest, {name: os.path.expandvars(value) for name, value in variables.items()}


def take_files(files: list[int], numbers: list[int]) -> None:
    """Gives the open files the numbers that they have in the process that sent them."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files]
    close(files)
    for number, target in zip(moved, numbers, strict=True):
        os.dup2(number, target)
        os.close(number)


def take_environment(variables: Mapping[str, str]) -> None:
    """Sets the environment, and in libraries the values that they took from the server's."""
    os.environ.clear()
    os.environ.update(variables)
    openrlhf.set_variables()
    threads = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0].strip()  # a number for each level
    if threads.isdecimal() and int(threads):  # about others, OpenMP warns
        torch.set_num_threads(int(threads))
    numpy.random.seed()  # otherwise all processes would draw the same numbers
    filters = [text for text in os.environ.get("PYTHONWARNINGS", "").split(",") if text]
    warnings._processoptions(filters)  # pyrefly: ignore[missing-attribute]  as the interpreter does
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo:
        dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"


if __name__ == "__main__":
    run = serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    run()
