"""GPU code of engines on a CPU: vLLM's second model runner, with interpreted Triton kernels, and asynchronous
scheduling. A stand-in (tests/standins/gpu_engines) provides its environment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from families import tiny_family

from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.vllm.engine import engine_environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_engines")]
STANDIN = Path(__file__).parents[1] / "standins" / "gpu_engines"
WORKER = Path(__file__).parent / "run_worker.py"
ON_CPU = EngineOptions(model="", dtype="fp32", max_len=256, seed=0, transfer_backend="gloo", on_gpu=False)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict]:
    """Returns a function that runs `workers/{name}.py` in a process of its own, which loads the stand-in at
    its start."""

    def run(name: str, family: str, *, is_asynchronous: bool = True, **arguments) -> dict:
        out = tmp_path / f"{name}-{is_asynchronous}"
        out.mkdir()
        model = str(tiny_family(tmp_path / family, family))
        environment = {
            **os.environ,
            **engine_environment(ON_CPU),
            "PYTHONPATH": os.pathsep.join([str(STANDIN), *filter(None, sys.path)]),
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "ASYNCHRONOUS_SCHEDULING": "1" if is_asynchronous else "",
        }
        spec = json.dumps({"out": str(out), "model": model, **arguments})
        command = [sys.executable, str(WORKER), name, spec]
        with (out / "log").open("wb") as log:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=500).returncode
        assert code == 0, (out / "log").read_text()[-4000:]
        return json.loads((out / "rank0.json").read_text())

    return run


def test_answers_are_the_same_whenever_they_are_scheduled(run: Callable[..., dict]) -> None:
    """Engines have adapters from weight syncs. Tokens depend on their seeds alone, beside other requests and
    an aborted one; their log-probs, over what top-k and top-p kept, are those of the trainer's weights. A
    paused answer goes on with the new weights."""
    runs = [run("gpu_paths", "Qwen3", is_asynchronous=is_asynchronous) for is_asynchronous in (False, True)]
    for is_asynchronous, found in zip((False, True), runs, strict=True):
        assert found["is asynchronous"] == is_asynchronous and found["second runner"]
        assert max(found["errors"].values()) < 1e-4 and found["probe"] < 1e-4
        (old, before), (new, after) = found["versions"]
        assert (old, new) == (1, 2) and before >= 10 and after > 5 and before + after == 40
        assert found["old"] < 1e-4 and found["new"] < 1e-4 and found["old by new"] > 0.1
        for name, alone in found["alone"].items():
            assert alone == found["answers"][name]
        ((top_k,), (top_p,)) = found["answers"]["top-k"], found["answers"]["top-p"]
        # the sampled token beside the likely ones
        assert set(top_k["kept"]) == {4} and max(top_p["kept"]) > 6
        assert len(found["answers"]["two"]) == 2
    assert runs[0]["answers"] == runs[1]["answers"]


def test_a_paused_request_goes_on_with_its_cache(run: Callable[..., dict]) -> None:
    found = run("paused_requests", "Qwen3", keep_cache=True)
    (old, before), (new, after) = found["versions"]
    assert (old, new) == (1, 2) and before >= 20 and after > 20 and before + after == 100
    assert found["old"] < 1e-4 and found["new"] > 0.1
    assert found["new versions"] == [[2, 8]] and found["of new requests"] < 1e-4
    assert found["cached"] == [0, 128]


def test_vllm_tells_which_experts_read_each_token(run: Callable[..., dict]) -> None:
    """Experts are reported for tokens that a request finds in the cache too; across a sync they are those
    that first read the token, as backends/vllm/on_cpu/routing.py reports them where vLLM cannot."""
    found = run("gpu_routing", "Qwen3Moe", on_gpu=True)
    for answer, length, cached in zip(found["answers"], (148, 148, 152), (0, 128, 128), strict=True):
        assert answer == {"cached": cached, "shape": [length - 1, 2, 2], "type": "uint8", "differ": 0}
    (old, before), (new, after) = found["versions"]
    assert (old, new) == (1, 2) and before >= 10 and after > 5 and before + after == 40
    assert found["old"] < 1e-4 and found["new"] < 1e-4
    read_before = 140 + before
    by_old, by_new = found["paused"]
    assert len(by_new) == 179 and not any(by_old[: read_before - 1]) and not any(by_new[read_before:])
    assert any(by_new[:read_before]) and any(by_old[read_before:])
