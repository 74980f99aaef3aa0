"""The guard that notices the death of Ray's head, with a head that does what the test says."""

import socket
from types import SimpleNamespace

import pytest

from openrlhf.cluster import watchdog
from openrlhf.cluster.watchdog import BEAT, HEAD_LIMIT, is_refused

LONG = int(HEAD_LIMIT / BEAT)


class Ended:
    """Stand-in for the event of the guard, and a clock. It is set when the answers are used up."""

    def __init__(self, answers: list) -> None:
        self.now, self.answers = 0.0, iter(answers)

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.answer = next(self.answers, None)
        return self.answer is None

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("answers", "is_gone"),
    [([False] * 1000, False), ([False, *[True] * LONG], True), ([*[True] * (LONG - 1), False] * 10, False)],
    ids=["alive", "gone", "away for a while"],
)
def test_only_a_head_that_is_gone_ends_the_process(monkeypatch, answers, is_gone):
    ended, called = Ended(answers), []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: ended.now))
    monkeypatch.setattr(watchdog, "is_refused", lambda address: ended.answer)
    watchdog._guard("10.0.0.1:6379", called.append, ended, HEAD_LIMIT)
    assert called == (["10.0.0.1:6379"] if is_gone else [])


def test_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not is_refused(address)
    assert is_refused(address)


def test_a_network_that_does_not_answer_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*arguments, **named) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert not is_refused("10.0.0.1:6379")
