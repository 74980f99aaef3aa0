"""The real parts, with a model of a few thousand parameters."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.tasks.prepare import TaskFiles, prepare

os.environ.setdefault("OMP_NUM_THREADS", "1")
WORKERS = Path(__file__).parent / "workers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Word problems and an untrained model of their tokenizer."""
    folder = tmp_path_factory.mktemp("task")
    return prepare(folder, seed=0, num_pretrain=200, num_sft=200, num_prompts=64, num_eval=16)


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[..., list[dict]]:
    """Run `workers/{name}.py` on some ranks with arguments as JSON; returns what it wrote, one dict for each
    rank."""

    def run(name: str, num_ranks: int, **arguments) -> list[dict]:
        out = tmp_path / f"{name}-{num_ranks}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        spec = json.dumps({"out": str(out), **arguments})
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        command = [sys.executable, *(launcher if num_ranks > 1 else []), str(WORKERS / f"{name}.py"), spec]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]

    return run
