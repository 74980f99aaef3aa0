"""Models that share devices."""

import pytest

from openrlhf.cluster.placement import ExclusiveDevices


def test_models_on_shared_devices_wait_for_what_was_started_before():
    devices, seen = ExclusiveDevices(shared=True), []
    for refs in (["score 0", "score 1"], ["update"], ["score 2"]):
        assert devices.run(lambda after, refs=refs: seen.append(after) or refs) == refs
    assert seen == [[], ["score 0", "score 1"], ["update"]]


def test_models_on_devices_of_their_own_wait_for_nobody():
    devices, seen = ExclusiveDevices(shared=False), []
    for refs in (["score"], ["update"]):
        assert devices.run(lambda after, refs=refs: seen.append(after) or refs) == refs
    assert seen == [[], []]


def test_what_could_not_be_started_is_not_waited_for():
    devices = ExclusiveDevices(shared=True)
    devices.run(lambda after: ["score"])
    with pytest.raises(ZeroDivisionError):
        devices.run(lambda after: 1 / 0)
    assert devices.run(lambda after: after) == ["score"]
