"""The filter of system calls in a sandbox, interpreted here as the kernel would."""

import ctypes
import struct

import pytest

from openrlhf.agents import isolation
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
