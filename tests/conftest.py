import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
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
FAST_EXAMPLES = 0.25
"""Fraction of the examples of a property that are tried without the tests that start processes."""
GPU_TESTS = Path(__file__).parent / "gpu"

# the tests' models are so small that a second thread costs more than it saves
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENRLHF_FAULT", "")  # no fault, but `fault` checks that it knows the point
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # for processes that join each other's cluster

INDEPENDENT = ("test_invariance", "test_iterations", "test_rl", "test_rl_learning", "test_supervised")
"""Long files whose test functions share only what `build_once` builds: any process may run any of them."""

STARTS_PROCESSES = re.compile(r"^pytestmark = \[?pytest\.mark\.processes\b", re.MULTILINE)
"""Line of a file whose tests all start processes, wait for time limits, or try very many commands."""


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from all tests but `tests/gpu`, before torch is imported: expected numbers hold for CPU
    arithmetic, and tests start more ranks than a machine may have GPUs."""
    asked = (Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args)
    if not all(path.is_relative_to(GPU_TESTS) for path in asked):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class Units(LoadScopeScheduling):
    """Distributes whole files over the processes, because of their fixtures, but the long files function by
    function."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return f"{file}::{test.partition('[')[0]}" if Path(file).stem in INDEPENDENT else file


@pytest.hookimpl(optionalhook=True)  # the hook does not exist with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Units:
    return Units(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files that start processes if their marker is: nothing of what they need is imported."""
    is_candidate = _is_fast(config) and collection_path.suffix == ".py"
    return True if is_candidate and STARTS_PROCESSES.search(collection_path.read_text()) else None


def pytest_collection_finish() -> None:
    """Keeps the modules, which live until the end, out of the collections of garbage."""
    heap.freeze()
    heap.grow()


def _is_fast(config: pytest.Config) -> bool:
    return "not processes" in config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Sorts the longest tests first, so that both processes have work until the end. One test with trained
    models comes first, and the others late: the first trains the models while the other process has other
    work."""
    if _is_fast(config):
        _leave_out_rows(items)
        _try_fewer(
            {item.function for item in items if hasattr(getattr(item, "function", None), "hypothesis")}
        )
    yield  # pytest leaves out what the command line does not ask for
    needs = lambda item: "knowing" in getattr(item, "fixturenames", ())
    items.sort(key=lambda item: ("e2e" not in item.path.parts, needs(item)))
    first = next(filter(needs, items), None)  # a list is empty while it is sorted
    items.sort(key=lambda item: item is not first)
    if _is_fast(config):
        items.sort(key=lambda item: "tools" not in item.path.parts)  # their files take longest


def _leave_out_rows(items: list[pytest.Item]) -> None:
    """Gives the marker `processes` to all rows of a test with the marker `few(n)` but n, spread evenly over
    those that fast runs would try."""
    rows: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_tried = not any(map(item.get_closest_marker, ("processes", "slow")))
        if item.get_closest_marker("few") and is_tried:
            rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in rows.values():
        count = of_test[0].get_closest_marker("few").args[0]
        kept = {i * len(of_test) // count for i in range(count)}
        for i, item in enumerate(of_test):
            if i not in kept:
                item.add_marker(pytest.mark.processes)


def _try_fewer(properties: set[Callable[..., None]]) -> None:
    """Lowers the numbers of examples, also those that a property's own settings name."""
    for test in properties:
        chosen = test._hypothesis_internal_use_settings
        fewer = min(chosen.max_examples, max(10, int(chosen.max_examples * FAST_EXAMPLES)))
        test._hypothesis_internal_use_settings = hypothesis.settings(chosen, max_examples=fewer)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Gives the tests a cache folder of their own: they leave nothing in the user's cache and find nothing
    there."""
    os.environ["OPENRLHF_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Returns build_once(name, build): it returns the folder that `build` filled, in whichever process of
    this test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def build_in(name: str, build: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # a process that failed may have left it
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return build_in
