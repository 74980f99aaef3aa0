"""Control plane of engines, some of which fail. Ray's calls run at once here."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from openrlhf.cluster.engine_client import RayEngineClient

DEATH = RayActorError(error_msg="class_name: EngineActor\n\tpid: 17\n\tip: 10.0.0.1\n")
REFUSAL = RayTaskError("update_weights", "Traceback ...", KeyError("no such weight"))


class Engine:
    """Engine that answers with its number, and with `error` to one method."""

    def __init__(self, number: int, method: str = "", error: Exception | None = None) -> None:
        self.number, self.method, self.error = number, method, error
        self.calls: list[tuple] = []

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments) -> SimpleNamespace:
            self.calls.append((method, *arguments))
            future: Future = Future()
            if method == self.method:
                future.set_exception(self.error)
            else:
                future.set_result([self.number])
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def put(monkeypatch: pytest.MonkeyPatch) -> list:
    """Records the objects given to the object store, which hands them on to every engine."""
    given = []
    monkeypatch.setattr(ray, "put", lambda value: given.append(value) or value)
    return given


def synced(*engines: Engine) -> RayEngineClient:
    client = RayEngineClient(engines, workers_per_engine=2)
    client.version = 3
    client.start_weight_update()
    client.update_weights({"a": 1})
    client.finish_weight_update()
    return client


def test_an_engine_that_fails_is_left_out_and_said_why():
    engines = Engine(0), Engine(1, "update_weights", DEATH), Engine(2, "update_weights", REFUSAL), Engine(3)
    client = synced(*engines)
    assert client.failures.keys() == {1, 2}
    assert "process 17 on 10.0.0.1" in client.failures[1]
    assert client.failures[2] == "KeyError: 'no such weight'"
    assert client.checksums() == {0: [0], 3: [3]}
    whole = [("start_weight_update",), ("update_weights", {"a": 1}), ("finish_weight_update", "3")]
    assert engines[0].calls == engines[3].calls == [*whole, ("loaded_checksums",)]
    assert engines[1].calls == engines[2].calls == whole[:2]


def test_where_all_wait_for_each_other_the_first_failure_is_raised():
    client = RayEngineClient([Engine(0), Engine(1, "update_weights", DEATH)], workers_per_engine=1)
    client.ends_with_first = True
    with pytest.raises(RayActorError):
        client.update_weights({})


def test_every_engine_has_ranks_of_its_own():
    engines = [Engine(i) for i in range(3)]
    client = RayEngineClient(engines, workers_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1})
    client.init_weight_transfer_engine({"packed": True})
    assert client.num_engines == 3
    method = "init_weight_transfer_engine"
    for i, engine in enumerate(engines):
        assert engine.calls == [(method, {"rank_offset": 1 + 2 * i}), (method, {"packed": True})]


def test_hundreds_of_engines_get_the_names_of_all_tensors_from_one_place(put: list):
    engines = [Engine(i) for i in range(512)]
    client = synced(*engines)
    assert put == [{"a": 1}] and not client.failures
    assert all(len(engine.calls) == 3 for engine in engines)
    assert client.checksums() == {i: [i] for i in range(512)}
