import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock
from xdist.scheduler import LoadScopeScheduling

from openrlhf import heap

pytest_plugins = ["leftovers"]
heap.grow()
hypothesis.settings.register_profile("openrlhf", deadline=None)  # no test measures time
hypothesis.settings.load_profile("openrlhf")
GPU_TESTS = Path(__file__).parent / "gpu"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models of the tests are so small that a second one costs
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # for processes that join each other's cluster

INDEPENDENT = ("test_invariance", "test_iterations", "test_rl", "test_rl_learning", "test_supervised")
"""Long files whose test functions share nothing but what `build_once` makes: any process may take one."""


def pytest_configure(config: pytest.Config) -> None:
    """What tests compare holds for the arithmetic of a CPU, and they start more ranks than a machine may have
    GPUs: all but `tests/gpu` see none. Before torch is imported."""
    asked = (Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args)
    if not all(path.is_relative_to(GPU_TESTS) for path in asked):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class Units(LoadScopeScheduling):
    """Processes take whole files, because of their fixtures, and of the long files single functions."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return f"{file}::{test.partition('[')[0]}" if Path(file).stem in INDEPENDENT else file


@pytest.hookimpl(optionalhook=True)  # as with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Units:
    return Units(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that both processes have work to the end. Of the tests with trained models one
    begins and the others come late: it trains them while the other process has something else to do."""
    needs = lambda item: "knowing" in getattr(item, "fixturenames", ())
    items.sort(key=lambda item: ("e2e" not in item.path.parts, needs(item)))
    items.sort(key=lambda item: item is not next(filter(needs, items), None))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests leave nothing in the user's cache, and find nothing there."""
    os.environ["OPENRLHF_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """build_once(name, build) -> the folder that `build` filled, in whichever process of this test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def build_in(name: str, build: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return build_in
