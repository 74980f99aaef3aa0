"""After a test run no process of it is left, and its last line counts all of them."""

import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parents[2]
PARALLEL = ["-p", "xdist", "-n", "1"]
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other plugins of the environment take longer to import than the tests take."""
LEAVES_ONE = """
    import subprocess
    def test_it():
        subprocess.Popen(["sleep", "298"], start_new_session=True)
"""
ENDS_ALL = """
    import multiprocessing, subprocess, pytest
    @pytest.fixture(scope="session")
    def server():
        process = subprocess.Popen(["sleep", "299"])
        yield
        process.kill()
    def test_it(server):
        process = multiprocessing.get_context("forkserver").Process(target=print)
        process.start()
        process.join()
"""


@pytest.mark.parametrize(
    ("text", "code", "parallel"), [(LEAVES_ONE, 1, []), (LEAVES_ONE, 1, PARALLEL), (ENDS_ALL, 0, PARALLEL)]
)
def test_a_run_that_leaves_a_process_fails(tmp_path, text, code, parallel) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    (tmp_path / "conftest.py").write_text("import leftovers\nleftovers.GRACE_S = 2\n" * (code == 1))
    command = [sys.executable, "-m", "pytest", "-p", "leftovers", "-p", "no:cacheprovider", "test_it.py"]
    ran = subprocess.run(
        [*command, *parallel],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(TESTS / "helpers"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == code, ran.stdout
    assert "1 passed" in ran.stdout
    told = "outlives the tests that started it: sleep 298 (PYTEST_CURRENT_TEST=test_it.py::test_it (call))"
    assert (told in ran.stdout) == (code == 1)


def test_the_tests_of_several_runs_are_counted_together(tmp_path) -> None:
    text = """
        import pytest
        def test_passes(): pass
        def test_fails(): raise OSError
        @pytest.fixture
        def broken(): raise OSError
        def test_has_no_fixture(broken): pass
        @pytest.mark.skip
        def test_is_skipped(): pass
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "0.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=120)
    total = runpy.run_path(str(TESTS.parent / "tools" / "count_tests.py"))["total"]
    assert total([tmp_path / "0.xml"] * 2) == "2 passed, 4 failed, 2 skipped"
