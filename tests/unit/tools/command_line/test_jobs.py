"""Jobs of several processes: what they inherit, how their ranks meet, and how they end."""

import os
import time
from pathlib import Path

import pytest

from openrlhf.tools.command_line.jobs import LAUNCHED, _processes, run_job

PROGRAM = """
import os
names = {names!r}
rank = os.environ.get("RANK", "-")
open(f"inherited{{rank}}", "w").write(" ".join(name for name in names if name in os.environ))
if rank != "-":
    from torch.distributed import TCPStore
    host, port, ranks = (os.environ[n] for n in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    store = TCPStore(host, int(port), is_master=False)
    store.set(rank, os.environ["OMP_NUM_THREADS"])
    line = b" ".join(store.get(str(i)) for i in range(int(ranks)))
    os.write(1, line + b"\\n")  # in one piece: the ranks share the log
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "child.py").write_text(PROGRAM.format(names=LAUNCHED))
    return tmp_path


def run(folder: Path, module: str, ranks: int = 1, **options) -> tuple[int, str]:
    with open(folder / "log", "w+") as log:
        code = run_job([module], log, ranks=ranks, folder=folder, **options)
        log.seek(0)
        return code, log.read()


def test_a_job_does_not_inherit_the_launcher_of_its_parent(program: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank of torchrun that starts a job is not a rank of that job."""
    for name in LAUNCHED:
        monkeypatch.setenv(name, "7")
    assert run(program, "child")[0] == 0
    assert (program / "inherited-").read_text() == ""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_ranks_are_told_their_places(tmp_path: Path, ranks: int) -> None:
    """The command `env` prints its variables."""
    parents = {"PATH": os.environ["PATH"], "WORLD_SIZE": "7", "MINE": "kept"}
    with (
        open(tmp_path / "log", "w+") as log,
        _processes(["env"], log, ranks, parents, folder=tmp_path) as job,
    ):
        assert [process.wait(30) for process in job] == [0] * ranks
    lines = (tmp_path / "log").read_text().split()
    assert lines.count("MINE=kept") == ranks
    places = sorted(line for line in lines if line.startswith(("RANK=", "LOCAL_RANK=", "WORLD_SIZE=")))
    if ranks == 1:
        assert not places
        return
    numbers = [f"LOCAL_RANK={i}" for i in range(ranks)] + [f"RANK={i}" for i in range(ranks)]
    assert places == [*numbers, *[f"WORLD_SIZE={ranks}"] * ranks]
    (port,) = {line for line in lines if line.startswith("MASTER_PORT=")}
    assert port != "MASTER_PORT=0" and lines.count("MASTER_ADDR=127.0.0.1") == ranks
    assert lines.count("OMP_NUM_THREADS=1") == lines.count("LOCAL_WORLD_SIZE=" + str(ranks)) == ranks


@pytest.mark.processes
def test_ranks_meet_in_a_store_of_the_parent(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, "7")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert run(program, "child", 2, environment=environment) == (0, "1 1\n1 1\n")
    names = (program / "inherited1").read_text().split()
    assert "GROUP_RANK" not in names and {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= {*names}


@pytest.mark.processes
def test_a_failed_rank_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import os, sys, time\ntime.sleep(60 * (os.environ['RANK'] == '0'))\nsys.exit(3)\n"
    )
    started = time.monotonic()
    assert run(tmp_path, "child", 2)[0] == 3
    assert time.monotonic() - started < 30


@pytest.mark.processes
def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import time; print('up', flush=True); time.sleep(60)\n")
    seconds: list[float] = []
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        run(tmp_path, "child", timeout=0.5, tick=seconds.append)
    assert seconds == sorted(seconds) and seconds[-1] <= 0.5
