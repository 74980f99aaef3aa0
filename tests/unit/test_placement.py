"""Placement of models that share devices."""

import re
from pathlib import Path

import pytest
from ray._private import accelerators

from openrlhf.cluster.placement import ExclusiveDevices, visible_devices_untouched


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


def test_ray_leaves_the_devices_of_every_vendor_that_it_knows_alone():
    """The variables are all those of this kind in Ray's source."""
    texts = [path.read_text() for path in Path(accelerators.__path__[0]).glob("*.py")]
    known = {name for text in texts for name in re.findall(r"RAY_EXPERIMENTAL_NOSET_\w+", text)}
    assert visible_devices_untouched() == dict.fromkeys(known, "1")
    assert {f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ASCEND_RT")} < known
