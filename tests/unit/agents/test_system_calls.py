"""The limits of a sandbox, and its filter of system calls, interpreted here as the kernel would."""

import ctypes
import resource
import struct

import pytest

from openrlhf.agents import isolation, sandbox
from openrlhf.agents.isolation import MACHINES, SECCOMP

LOAD, EQUAL, AT_LEAST, ANSWER = 0x20, 0x15, 0x35, 0x06
ALLOWED, KILLED, REFUSED = 0x7FFF0000, 0x80000000, 0x50001
UNIX, INTERNET = 1, 2


def answer_of(program: list[tuple[int, int, int, int]], audit: int, number: int, first: int) -> int:
    """Runs a filter on the data of a call: its number, the architecture and its first argument."""
    data = struct.pack("IIQQ", number, audit, 0, first)
    value = place = 0
    while True:
        kind, then, otherwise, operand = program[place]
        place += 1
        if kind == ANSWER:
            return operand
        if kind == LOAD:
            (value,) = struct.unpack_from("I", data, operand)
        else:
            holds = {EQUAL: value == operand, AT_LEAST: value >= operand}[kind]
            place += then if holds else otherwise


def test_a_program_gets_the_limits_of_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_check", lambda made: None)  # it would run a program
    made = sandbox.Sandbox(seconds=2.5, memory=1 << 30, processes=3, disk=1 << 20, import_from=("/usr",))
    task = made._task("print(1)", "7")
    assert (task["code"], task["stdin"], task["disk"]) == ("print(1)", "7", 1 << 20)
    assert {getattr(resource, name): value for name, value in task["limits"].items()} == {
        resource.RLIMIT_AS: 1 << 30,
        resource.RLIMIT_CPU: 3,
        resource.RLIMIT_FSIZE: 1 << 20,
        resource.RLIMIT_NPROC: 3,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    assert task["environment"]["PYTHONPATH"] == "/usr"
    assert {"/usr", task["python"]} <= task["visible"].keys() and "/etc" not in task["visible"]


@pytest.mark.parametrize("name", MACHINES)
def test_the_filter_refuses_what_leaves_the_sandbox(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[list[tuple[int, int, int, int]]] = []

    def call(function: str, *arguments) -> None:
        assert (function, arguments[:2], arguments[3:]) == ("prctl", (SECCOMP, 2), (0, 0))
        length, address = struct.unpack("HxxxxxxQ", arguments[2])
        programs.append(list(struct.iter_unpack("HBBI", ctypes.string_at(address, 8 * length))))

    monkeypatch.setattr(isolation, "_call", call)
    monkeypatch.setattr(isolation.platform, "machine", lambda: name)
    isolation._refuse_system_calls()
    (program,) = programs
    machine = MACHINES[name]
    of = lambda number, first=0, audit=machine.audit: answer_of(program, audit, number, first)
    assert {of(number) for number in machine.refused} == {REFUSED}
    assert {425, 447} < {*machine.refused} and len(machine.refused) == 17
    others = {*range(460)} - {*machine.refused, machine.socket}
    assert {of(number) for number in others} == {ALLOWED}
    assert of(machine.socket, UNIX) == ALLOWED and of(machine.socket, INTERNET) == REFUSED
    assert of(1 << 30) == REFUSED, "the second table of x86_64 has other numbers"
    assert of(0, audit=machine.audit + 1) == KILLED
