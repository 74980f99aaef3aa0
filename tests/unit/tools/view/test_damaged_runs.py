"""Commands that read a run folder tell the path of a damaged file in a sentence, and wait for no FIFO."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damages import IN_ITS_PLACE
from run_folders import sample, write_journal, write_run

from openrlhf.errors import UsageError
from openrlhf.observability.journal import journal_steps, read_journal
from openrlhf.observability.lock import LOCK
from openrlhf.tools.command_line.runs import find_run
from openrlhf.tools.demo import demo
from openrlhf.tools.doctor.diagnose import examine_run
from openrlhf.tools.doctor.mismatch import compute_signs
from openrlhf.tools.replay.recorded import RecordedRun
from openrlhf.tools.view import rollouts, server, watch
from openrlhf.tools.view.flags import rollouts_parser
from openrlhf.tools.view.followed_run import FollowedRun
from openrlhf.tools.view.index import Index
from openrlhf.tools.view.metrics import Metrics
from openrlhf.tools.view.report import write_report


def _replay(folder: Path) -> None:
    run = RecordedRun(folder)
    assert run.num_ranks and run.steps is not None
    for path in run.rollouts().values():
        read_journal(path)


def _view(folder: Path) -> None:
    (run,) = server.find_runs([folder])
    index = Index([run], cache=folder.parent / "cache")
    while index.update():
        pass
    index.close()
    Metrics(run / "metrics.jsonl").update()


COMMANDS: Mapping[str, Callable[[Path], object]] = {
    "rollouts": lambda folder: rollouts.run(rollouts_parser().parse_args([str(folder)])),
    "doctor": lambda folder: examine_run(folder, as_data=True),
    "replay": _replay,
    "report": write_report,
    "watch": lambda folder: watch.show_once(FollowedRun(find_run(folder)), 100),
    "view": _view,
}
JOURNAL = "rollouts/step_000001.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(run := tmp_path / "run", {"rollout/reward_mean": [0.5, 0.6]})
    write_journal(run, 1, [sample([0, 1, 2], reward=1.0), sample([0, 2, 1])])
    return run


def told(folder: Path, command: Callable[[Path], object], name: str) -> None:
    """Calls a command, which succeeds or names the file."""
    try:
        command(folder)
    except UsageError as error:
        assert str(folder) in str(error), (name, str(error))


FILES = ("argv.txt", "metrics.jsonl", "health.jsonl", LOCK, "env.json", JOURNAL, "previous")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [kind for kind in IN_ITS_PLACE if kind != "huge"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.few(10)  # among them every kind and every file
def test_a_damaged_file_is_told_by_its_path(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    IN_ITS_PLACE[kind](file)
    for name, command in COMMANDS.items():
        told(folder, command, name)


@pytest.mark.parametrize("change", ["a column is missing", "other types", "cut", "no metadata"])
def test_a_damaged_journal_is_told_by_its_path(folder: Path, change: str) -> None:
    path = journal_steps(folder / "rollouts")[1]
    table = pq.read_table(path)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif change == "a column is missing":
        pq.write_table(table.drop_columns(["outcome"]), path)
    elif change == "no metadata":
        pq.write_table(table.replace_schema_metadata(None), path)
    else:
        place = table.column_names.index("reward")
        pq.write_table(table.set_column(place, "reward", pa.array(["much"] * len(table))), path)
    for name, command in COMMANDS.items():
        told(folder, command, name)
    if change != "no metadata":
        with pytest.raises(UsageError, match=path.name):
            read_journal(path)


def test_rows_without_a_step_are_told_by_their_line(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": "3"}\n')
    for name in ("doctor", "replay", "report"):
        with pytest.raises(UsageError, match=r"metrics\.jsonl:3: .*step '3'"):
            COMMANDS[name](folder)


@pytest.mark.filterwarnings("error")
def test_the_signs_of_equal_halves_are_numbers() -> None:
    """The gap is 0 in the later half, and 0 on both sides of the start."""
    gap = np.array([0.5] * 4 + [0.0] * 8)
    row = SimpleNamespace(
        difference=gap, sampler=-np.ones(12), trainer=gap - 1, actions=np.arange(12), version=0,
        token_ids=np.arange(13),
    )  # fmt: skip
    signs = compute_signs([row])  # type: ignore[list-item]
    assert signs.growth == 0 and np.isfinite([signs.size, signs.bias, signs.curve]).all()


def test_the_demo_prints_its_commands_as_a_shell_reads_them(tmp_path: Path, capsys) -> None:
    rows = tmp_path / "a b" / "rows.jsonl"
    words = demo._words("sft", "--data.dataset", rows, "--train.seed 1")
    assert words == ["--data.dataset", str(rows), "--train.seed", "1"]
    printed = capsys.readouterr().out.removeprefix("$ ").replace("\\\n", "")
    assert shlex.split(printed) == ["openrlhf", "sft", *words]
