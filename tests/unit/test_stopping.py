"""Signals in a training loop, sent to this process itself."""

import os
import signal
import threading
import time

import pytest

from openrlhf import errors, stopping
from openrlhf.errors import SIGNALS, ErrorCode, RunError, Stopped, catch
from openrlhf.stopping import EXIT_STOPPED, Dropped, Stop

pytestmark = pytest.mark.usefixtures("outlives_stops")


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request(number: int, capfd: pytest.CaptureFixture) -> None:
    stop = Stop()
    with pytest.raises(Stopped) as ended, stop.deferred(300):
        send(number)
        send(number)  # as a launcher passes it on
        assert stop.is_requested
        raise stop.at_boundary(saved=True)
    assert (ended.value.code, ended.value.is_at_boundary) == (EXIT_STOPPED, True)
    send(number)  # the end of the run is not interrupted
    limits = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert limits and all(limit.daemon for limit in limits), "and does not wait for its limit"
    assert " 300 s (--train.grace_seconds)" in capfd.readouterr().err


def test_a_run_without_a_checkpoint_ends_with_the_code_of_the_signal() -> None:
    stop = Stop()
    with pytest.raises(Stopped) as ended, stop.deferred(300):
        send()
        raise stop.at_boundary(saved=False)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("how", ["second signal", "end of the grace", "no grace"])
def test_a_run_that_ends_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ONE_STOP", 0.0)
    catch(errors.stop_at_once)
    grace = {"second signal": 300, "end of the grace": 0.05, "no grace": 0}[how]
    with pytest.raises(Stopped) as ended, Stop().deferred(grace):
        send()
        if how == "second signal":
            send(signal.SIGINT)
        time.sleep(10)
    assert ended.value.code == 128 + (signal.SIGINT if how == "second signal" else signal.SIGTERM)
    assert not ended.value.is_at_boundary


def test_what_a_resumed_run_repeats_is_dropped() -> None:
    stop = Stop()
    with stop.deferred(300):
        with pytest.raises(Dropped), stop.dropping():
            send()
        with pytest.raises(Dropped), stop.dropping():
            pytest.fail("it was asked to stop before")


def test_an_error_after_the_signal() -> None:
    """The signal may have ended other processes of the run too; other errors stay what they are."""
    lost, other = RunError(ErrorCode.WORKER_FAILED, "died"), RunError(ErrorCode.NOT_FINITE, "NaN")
    for error, kind in ((lost, Stopped), (other, RunError)):
        stop = Stop()
        with pytest.raises(kind), stop.deferred(300, lambda error: error is lost):
            send()
            raise error
    with pytest.raises(RunError), Stop().deferred(300, lambda error: True):
        raise lost


def test_handlers_are_restored_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError), Stop().deferred(300):
        raise ValueError
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().deferred(300):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_that_hangs_ends_the_process_with_its_stacks(monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with stopping.limited(10, lambda: "rank 1"):
        pass
    with stopping.limited(0.01, lambda: "rank 1 (process 7 on node1) in step 3"):
        assert ended.wait(10)
    first, *stacks = capfd.readouterr().err.splitlines()
    assert first == "rank 1 (process 7 on node1) in step 3 made no progress for 0.01 s; its stacks:"
    assert any("test_a_step_that_hangs" in line for line in stacks)
