"""Names of the processes of a run that ended, from Ray's errors."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError
from refusals import refused

from openrlhf.cluster import process_exits
from openrlhf.cluster.process_exits import dead_among, describe_cause, explaining_exits, is_death
from openrlhf.errors import ErrorCode

REPORT = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: 3) was \
22.32GB used / 23.54GB limit (0.947944)
OOM kill reason: Memory usage 24047271936B exceeded threshold of 24012677120B
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(8c9): job ID=1, lease ID=1, task name=PolicyWorker.__init__, required resources={}, \
pid=24640, actual memory used=5.35GB, worker ID=7bf8)
(Actor(bcae): job ID=01, lease ID=0, task name=EngineActor.__init__, required resources={}, pid=24636, \
actual memory used=0.21GB, worker ID=a04e)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
13387\t6.49\tpython another_program.py
24640\t5.35\tray::PolicyWorker.call
25062\t1.73\tVLLM::EngineCore
23003\t0.63\tpython -m pytest
Refer to the documentation on how to address the out of memory issue"""
"""Ray's report, shortened."""


def test_a_process_that_ray_ends_for_memory_is_named_with_the_largest_ones() -> None:
    with refused(ErrorCode.WORKER_FAILED) as told, explaining_exits():
        raise OutOfMemoryError(REPORT)
    text = told.value.text
    assert text.startswith("a rank of the policy died: Ray ended process 24640 on 10.0.0.7")
    assert "(22.32GB of 23.54GB)" in text
    assert "13387\t6.49\tpython another_program.py\n" in text and "pytest" not in text


def test_a_report_of_another_form_is_no_second_error() -> None:
    with refused(ErrorCode.WORKER_FAILED) as told, explaining_exits():
        raise OutOfMemoryError("Task was killed due to the node running low on memory.")
    assert told.value.text.startswith("a process of the run died: Ray ended process ?")


@pytest.mark.parametrize("death", [OutOfMemoryError(REPORT), RayActorError(error_msg="gone")])
def test_the_death_of_a_rank_explains_the_errors_of_those_that_wait_for_it(death, monkeypatch):
    """The ranks answer whether they live: the first one does, Ray raises the death of the second."""
    answers: dict[str, Any] = {"first": None, "second": death}

    def get(ref: str, timeout: float) -> None:
        if answers[ref] is not None:
            raise answers[ref]

    monkeypatch.setattr(process_exits.ray, "get", get)
    monkeypatch.setattr(process_exits.ray, "wait", lambda refs, **_: (refs, []))
    ready = [SimpleNamespace(remote=lambda name=name: name) for name in answers]
    members: Any = [SimpleNamespace(__ray_ready__=each) for each in ready]
    assert dead_among(members) == {1: death}
    with refused(ErrorCode.WORKER_FAILED), explaining_exits(lambda: members):
        raise GetTimeoutError("the first rank waits")


def test_an_engine_that_ray_ends_for_memory_is_replaced() -> None:
    """An engine's error, also as the cause of a task's, is a death; an exception of its code is none."""
    death = OutOfMemoryError(REPORT.replace("PolicyWorker", "EngineActor", 1))
    assert is_death(death) and is_death(RayTaskError("generate", "trace", death))
    assert not is_death(RayTaskError("generate", "trace", ValueError("a bad prompt")))
    assert describe_cause(death).startswith("a vLLM engine died: Ray ended process 24640")
