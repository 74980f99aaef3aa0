"""Stands for the Python interpreter of Ray's workers: it has them forked by the run's warm server.

The module is a program of its own, which imports the standard library alone, because it starts as often as a
worker does: python interpreter.py PYTHON ADDRESS COMMAND. It lives as long as the worker, passes signals
on to it, and ends with its exit status. Commands that the server does not serve run in PYTHON itself, and so
does every command if no server answers.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT)
"""Signals that are passed on to the worker."""

POLL = 0.5
"""Seconds between two checks whether the process that started this one lives."""

NUMBER = struct.Struct("!I")
"""Format of the length of a request, of a process id and of an exit status."""


def main(python: str, address: str, command: list[str]) -> int:
    """Runs `python COMMAND` in a process that the server at the socket `address` forks, and returns its exit
    status. Does not return if the command runs without the server."""
    parent, connection = os.getppid(), socket.socket(socket.AF_UNIX)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until they can be passed on
    pid = is_served(command) and ask(connection, address, command)
    if pid:
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if not pid:
        os.execv(python, [python, *command])
    connection.settimeout(POLL)
    while os.getppid() == parent:
        with suppress(TimeoutError):
            status = connection.recv(NUMBER.size)
            return NUMBER.unpack(status)[0] if status else 1
    return 1  # the server kills the worker when the connection closes


def is_served(command: list[str]) -> bool:
    """Returns True for a worker of Ray and for a process that multiprocessing spawns in one."""
    return os.path.basename(command[0]) == "setup_worker.py" or "--multiprocessing-fork" in command


def ask(connection: socket.socket, address: str, command: list[str]) -> int:
    """Sends the command, the environment and the open files of this process to the server. Returns the id of
    the forked process; 0 if the server does not answer."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if is_inherited(number)]
    request = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": numbers,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "parent": os.getppid(),
    }
    text = json.dumps(request).encode()
    try:
        connection.connect(address)
        socket.send_fds(connection, [NUMBER.pack(len(text))], numbers)
        connection.sendall(text)
        answer = connection.recv(NUMBER.size)
    except OSError:
        return 0
    return NUMBER.unpack(answer)[0] if answer else 0


def is_inherited(number: int) -> bool:
    """Returns True if a program that this process executes has the open file."""
    try:
        return os.get_inheritable(number)
    except OSError:  # the file of the listing is closed by now
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
