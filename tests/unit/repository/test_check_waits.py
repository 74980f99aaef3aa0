"""tools/check_waits.py, the check of `make lint` for waits without a timeout."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tools" / "check_waits.py"


def check(folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True)
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "call",
    [
        *(
            "ray.get(ref)",
            "ray.wait(refs, num_returns=2)",
            "future.result()",
            "event.wait()",
            "thread.join()",
        ),
        *("jobs.get()", "lock.acquire()", "process.communicate()", "subprocess.run(command, check=True)"),
        *("await asyncio.wait({task})", "as_completed(calls)", "os.wait()", "wait([done])"),
        "dist.init_process_group(backend)",
    ],
)
def test_a_wait_without_a_timeout_is_found(tmp_path: Path, call: str) -> None:
    (tmp_path / "module.py").write_text(f"async def run():\n    x = {call}\n")
    (found,) = check(tmp_path)
    assert found.startswith(f"{tmp_path / 'module.py'}:2: ") and "may wait for ever" in found


@pytest.mark.parametrize(
    "source",
    [
        "ray.get(ref, timeout=5)",
        "thread.join(timeout)",
        "', '.join(names)",
        "options.get(name)",
        "future.result()  # bounded: it is done",
        "ray.get(\n    ref  # bounded: by the watch\n)",
        "# bounded .result(): the watch ends calls\na.result()\nb.result()",
        "dist.barrier()",
    ],
)
def test_other_calls_are_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "module.py").write_text(source)
    assert not check(tmp_path)


@pytest.mark.parametrize("comment", ["# bounded:", "# bounded .get(): an idle thread"])
def test_an_allowance_has_a_reason_and_a_kind(tmp_path: Path, comment: str) -> None:
    (tmp_path / "module.py").write_text(f"{comment}\nfuture.result()  {comment}\n")
    assert len(check(tmp_path)) == 1


@pytest.mark.processes
def test_the_package_has_none() -> None:
    assert not check(ROOT / "openrlhf")
