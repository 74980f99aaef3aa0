import errno
import json
import math
import os
import queue
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import records
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import FORKSERVER

from openrlhf.config.ppo import PPOLoggerConfig
from openrlhf.observability import journal as journal_module
from openrlhf.observability.hooks.base import Evaluation, Hook
from openrlhf.observability.journal import (
    Journal,
    Trained,
    journal_steps,
    num_samples,
    read_journal,
    read_rows,
    read_table,
)
from openrlhf.observability.observer import Observer
from openrlhf.observability.rollout_table import to_table, to_trajectories
from openrlhf.observability.run_folder import RunFolder
from openrlhf.types import Batch, Image, Outcome, Prompt, Trajectory, runs

TWO_TURNS = Trajectory(
    prompt=Prompt(prompt_id=7, text="2+2?", label={"answer": [4]}, source="sums", epoch=2),
    sample_index=3,
    part=1,
    token_ids=np.array([10, 11, 20, 21, 30, 22], np.int32),
    action_mask=np.array([False, False, True, True, False, True]),
    turn_starts=np.array([2, 5], np.int32),
    rollout_log_probs=np.array([-0.1, -1e-9, -math.pi], np.float32),
    weight_versions=runs([4, 4, 5]),
    reward=0.5,
    score=1.0,
    truncated=True,
    finish_reason="length",
    seed=2**63 + 1,
    extra_logs={"format": 1.0, "reward_model/tiny": -2.5},
    extra_texts={"judge": "right,\nbut 日本", "style": ""},
)
FAILED = Trajectory(
    prompt=Prompt(prompt_id=8, text="\x1b[2J <script> 日本"),
    sample_index=0,
    token_ids=np.array([10], np.int32),
    action_mask=np.array([False]),
    rollout_log_probs=np.zeros(0, np.float32),
    weight_versions=runs([]),
    reward=None,
    outcome=Outcome.ENV_ERROR,
    error="TimeoutError: no answer\nin 30 s",
)
EMPTY = replace(FAILED, token_ids=np.zeros(0, np.int32), action_mask=np.zeros(0, bool))
DECODE = lambda ids, after: f"<{after}{ids}>"


def write(rollouts: Path, step, trajectories, *, decode=None, mode="full", **job) -> Path:
    journal = Journal(rollouts, decode=decode, mode=mode)
    path = journal.write(step, trajectories, **job)
    journal.close()
    assert path is not None
    return path


def check_same(found, expected) -> None:
    """Compares every field, with its type."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in (f.name for f in fields(Trajectory)):
            a, b = getattr(one, name), getattr(other, name)
            if name == "extra_logs":
                assert list(a) == list(b)
                a, b = list(a.values()), list(b.values())
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None), name


def rewarded(reward, **changes) -> Trajectory:
    return replace(TWO_TURNS, reward=reward, **changes)


def test_a_row_holds_the_fields_of_a_sample(tmp_path):
    path = write(tmp_path, 12, [TWO_TURNS, FAILED], decode=DECODE)
    assert path == tmp_path / "step_000012.parquet"
    first, second = read_table(path).to_pylist()
    assert first["response"] == "<[10, 11][20, 21, 30, 22]>"
    assert first["action_ranges"] == [{"start": 2, "end": 4}, {"start": 5, "end": 6}]
    assert first["weight_versions"] == [{"version": 4, "count": 2}, {"version": 5, "count": 1}]
    assert first["turn_starts"] == [2, 5] and first["prompt_id"] == 7 and first["source"] == "sums"
    assert first["label"] == '{"answer": [4]}' and first["extra_logs"][0] == {"name": "format", "value": 1.0}
    assert second["outcome"] == "env_error" and second["reward"] is None and second["response"] == "<[10][]>"
    assert second["action_ranges"] == [] and first["advantages"] is None is first["optimizer_steps"]


def test_what_training_made_of_the_samples_stands_beside_them(tmp_path):
    """A failed sample between two others is in no batch; two epochs of two updates each run on two ranks."""
    one_action = replace(
        TWO_TURNS,
        token_ids=np.array([5, 6], np.int32),
        action_mask=np.array([False, True]),
        rollout_log_probs=np.array([-2.0], np.float32),
        weight_versions=runs([5]),
    )
    ts = [TWO_TURNS, FAILED, one_action]
    numbers = np.arange(4, dtype=np.float32)
    batch = replace(
        Batch.of([TWO_TURNS, one_action]), log_probs=-numbers, advantages=numbers, returns=numbers + 9
    )
    trained = Trained(batch=batch, schedule=[[[0], []], [[], [1]], [[1], []], [[], [0]]], first_update=10)
    rows = read_table(write(tmp_path, 1, ts, trained=trained)).to_pylist()
    assert [row["advantages"] for row in rows] == [[0, 1, 2], None, [3]]
    assert [row["log_probs"] for row in rows] == [[0, -1, -2], None, [-3]]
    assert [row["returns"] for row in rows] == [[9, 10, 11], None, [12]]
    assert [row["values"] for row in rows] == [row["ref_log_probs"] for row in rows] == [None] * 3
    assert [row["optimizer_steps"] for row in rows] == [[11, 14], None, [12, 13]]
    assert [row["ranks"] for row in rows] == [[0, 1], None, [1, 0]]


def test_round_trip(tmp_path):
    path = write(tmp_path, 1, [TWO_TURNS, FAILED, EMPTY])
    check_same(read_journal(path), [TWO_TURNS, FAILED, EMPTY])
    assert read_table(path)["response"].to_pylist() == [None] * 3
    assert read_journal(write(tmp_path, 2, [])) == []


def test_rows_are_found_in_any_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "ROW_GROUP", 4)
    ts = [FAILED if i % 3 == 0 else rewarded(float(i), sample_index=i) for i in range(11)]
    finished = [t for t in ts if t.ok]
    batch = replace(
        Batch.of(finished), advantages=np.repeat([t.sample_index for t in finished], 3).astype(np.float32)
    )
    trained = Trained(batch=batch, schedule=[[list(range(len(finished)))]], first_update=0)
    path = write(tmp_path, 1, ts, trained=trained)
    assert pq.ParquetFile(path).num_row_groups == 3
    check_same(read_journal(path), ts)
    rows = read_rows(path, [10, 0, 4, 5])
    assert [row["sample_index"] for row in rows] == [10, 0, 4, 5]
    assert [row["advantages"] for row in rows] == [[10] * 3, None, [4] * 3, [5] * 3]


LABELS = [None, "", "4", 4, 4.5, True, [1, [2]], {"a": None, "日": "本"}, "\ud800", {"\udfff": ["\ud800"]}]


@pytest.mark.parametrize("label", LABELS, ids=repr)
def test_labels_come_back(tmp_path, label):
    (found,) = read_journal(
        write(tmp_path, 1, [replace(FAILED, prompt=Prompt(prompt_id=0, text="", label=label))])
    )
    assert found.prompt.label == label and type(found.prompt.label) is type(label)


def test_pandas_reads_the_label_that_the_dataset_has(tmp_path):
    labels = ["14", 'a "b"', "", None, 14, ["14"], "null", "\ud800"]
    ts = [replace(FAILED, prompt=Prompt(prompt_id=0, text="", label=label)) for label in labels]
    frame = pd.read_parquet(write(tmp_path, 1, ts))
    assert frame.label.isna().tolist() == [label is None for label in labels]
    assert frame.label.dropna().tolist() == ["14", 'a "b"', "", "14", '["14"]', "null", '"\\ud800"']
    assert frame.label_is_json.tolist() == [False, False, False, False, True, True, False, True]


def test_labels_of_earlier_journals_are_read_in_the_form_of_today(tmp_path):
    """Earlier versions wrote each label as JSON, and no column `label_is_json`."""
    labels = ["14", None, 14, {"a": "b"}]
    ts = [replace(FAILED, prompt=Prompt(prompt_id=0, text="", label=label)) for label in labels]
    path = write(tmp_path, 1, ts)
    now, table = read_table(path), pq.read_table(path).drop_columns(["label_is_json"])
    written = pa.array([json.dumps(label) for label in labels])
    old = table.set_column(table.column_names.index("label"), "label", written)
    pq.write_table(old.replace_schema_metadata(now.schema.metadata), path)
    assert read_table(path, ["label", "label_is_json"]).equals(now.select(["label", "label_is_json"]))
    assert read_table(path, ["label"])["label"].to_pylist() == ["14", None, "14", '{"a": "b"}']
    assert [row["label_is_json"] for row in read_rows(path, [0, 2])] == [False, True]
    assert [t.prompt.label for t in read_journal(path)] == labels


def test_labels_that_json_does_not_know(tmp_path):
    labels = [math.nan, np.arange(3), (1, 2), {1, 2}]
    ts = [replace(FAILED, prompt=Prompt(prompt_id=0, text="", label=label)) for label in labels]
    nan, *others = [t.prompt.label for t in read_journal(write(tmp_path, 1, ts))]
    assert math.isnan(nan) and others == [[0, 1, 2], [1, 2], "{1, 2}"]


def test_text_that_is_no_unicode_is_escaped(tmp_path):
    odd = replace(
        FAILED, prompt=Prompt(prompt_id=0, text="a\ud800b\0"), error="\udcff.py", extra_logs={"\ud800": 1.0}
    )
    odd = replace(odd, extra_texts={"\ud800": "\udc00"})
    (found,) = read_journal(write(tmp_path, 1, [odd], decode=lambda ids, after: "\udfff"))
    assert found.prompt.text == "a\\ud800b\0" and found.error == "\\udcff.py"
    assert found.extra_logs == {"\\ud800": 1.0} and found.extra_texts == {"\\ud800": "\\udc00"}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_round_trip_of_any_trajectory(tmp_path_factory, data):
    mask = np.array(data.draw(st.lists(st.booleans(), max_size=20)), bool)
    count = int(mask.sum())
    numbers = lambda values, size, dtype: np.array(
        data.draw(st.lists(values, min_size=size, max_size=size)), dtype
    )
    texts = st.text(st.characters(exclude_categories=["Cs"]))
    trajectory = Trajectory(
        prompt=Prompt(prompt_id=data.draw(st.integers(0, 2**63 - 1)), text=data.draw(texts)),
        sample_index=0,
        token_ids=numbers(st.integers(0, 2**31 - 1), len(mask), np.int32),
        action_mask=mask,
        rollout_log_probs=numbers(st.floats(width=32), count, np.float32),
        weight_versions=runs(numbers(st.integers(0, 3), count, np.int32)),
        reward=data.draw(st.none() | st.floats()),
        extra_logs=data.draw(st.dictionaries(texts, st.floats(), max_size=3)),
        extra_texts=data.draw(st.dictionaries(texts, texts, max_size=3)),
    )
    path = write(tmp_path_factory.getbasetemp(), 1, [trajectory])
    check_same(read_journal(path), [trajectory])


def test_other_programs_read_it(tmp_path):
    """Other programs read the file also in a folder that looks like a partition."""
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    trained = Trained(batch=Batch.of([TWO_TURNS]), schedule=[[[0]]], first_update=0)
    path = write(folder, 1, [TWO_TURNS, FAILED], decode=DECODE, trained=trained)
    frame = pd.read_parquet(path)
    assert frame.reward[0] == 0.5 and math.isnan(frame.reward[1]) and frame.label[0] == '{"answer": [4]}'
    assert frame.token_ids[0].tolist() == TWO_TURNS.token_ids.tolist()
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert rows[0]["optimizer_steps"] == [1] and rows[1]["advantages"] is None
    assert rows[0]["extra_logs"][1] == {"name": "reward_model/tiny", "value": -2.5}
    assert rows[0]["extra_texts"][0] == {"name": "judge", "value": "right,\nbut 日本"}
    assert read_table(path).column_names == list(frame.columns) == rows.column_names
    assert read_table(path, ["extra_logs"]).column_names == ["extra_logs"]


OLD = r"""
{"prompt_id": 7, "episode": 2, "sample_index": 3, "seed": 9223372036854775809, "source": "sums", "label": {"answer": [4]}, "prompt": "2+2?", "response": "<[10, 11][20, 21, 30, 22]>", "reward": 0.5, "score": 1.0, "outcome": "ok", "error": "", "finish_reason": "length", "truncated": true, "extra_logs": {"format": 1.0}, "token_ids": [10, 11, 20, 21, 30, 22], "action_ranges": [[2, 4], [5, 6]], "rollout_log_probs": [-0.1, -1e-09, -3.141592653589793], "weight_versions": [[4, 2], [5, 1]]}
{"prompt_id": 8, "episode": 0, "sample_index": 0, "seed": 0, "source": "default", "label": "", "prompt": "\u001b[2J <script> \u65e5\u672c", "response": "<[10][]>", "reward": null, "score": null, "outcome": "env_error", "error": "TimeoutError: no answer\nin 30 s", "finish_reason": "stop", "truncated": false, "extra_logs": {}, "token_ids": [10], "action_ranges": [], "rollout_log_probs": [], "weight_versions": []}
{"prompt_id": 7, "episode": 2, "sample_index": 3, "seed": 9223372036854775809, "source": "sums", "label": {"answer": [4]}, "prompt": "2+2?", "response": null, "reward": "NaN", "score": "Infinity", "outcome": "ok", "error": "", "finish_reason": "length", "truncated": true, "extra_logs": {"format": "-Infinity"}, "token_ids": [10, 11, 20, 21, 30, 22], "action_ranges": [[2, 4], [5, 6]], "rollout_log_probs": [-0.1, -1e-09, -3.141592653589793], "weight_versions": [[4, 2], [5, 1]]}
""".lstrip()  # noqa: E501
"""Rollouts in JSON lines, written by release 0.1.0."""


def test_columns_of_earlier_versions_are_read_by_the_names_of_today(tmp_path):
    path = write(tmp_path, 1, [TWO_TURNS, FAILED])
    now = pq.read_table(path)
    old = now.rename_columns(["episode" if name == "epoch" else name for name in now.column_names])
    pq.write_table(old.replace_schema_metadata(now.schema.metadata), path)
    assert "epoch" not in pq.read_schema(path).names
    check_same(read_journal(path), [TWO_TURNS, FAILED])
    assert read_table(path, ["reward", "epoch"])["epoch"].to_pylist() == [2, 0]
    assert [row["epoch"] for row in read_rows(path, [1, 0])] == [0, 2] and num_samples(read_table(path)) == 2


def test_journals_without_texts_of_the_reward_source_are_read(tmp_path):
    path = write(tmp_path, 1, [TWO_TURNS])
    pq.write_table(pq.read_table(path).drop_columns(["extra_texts"]), path)
    check_same(read_journal(path), [replace(TWO_TURNS, extra_texts={})])


def test_journals_in_json_lines(tmp_path):
    (tmp_path / "step_000012.jsonl").write_text(OLD)
    write(tmp_path, 13, [FAILED])
    assert list(journal_steps(tmp_path)) == [12, 13]
    path = journal_steps(tmp_path)[12]
    known = replace(TWO_TURNS, part=0, extra_logs={"format": 1.0}, extra_texts={})
    odd = replace(known, reward=math.nan, score=math.inf, extra_logs={"format": -math.inf})
    check_same(read_journal(path), [known, FAILED, odd])
    table = read_table(path)
    assert table["response"].to_pylist() == ["<[10, 11][20, 21, 30, 22]>", "<[10][]>", None]
    assert num_samples(table) == 3 and table["advantages"].null_count == 3
    assert [row["prompt_id"] for row in read_rows(path, [1, 0])] == [8, 7]
    assert read_table(path, ["reward"]).column_names == ["reward"]


def test_files_are_found_by_step_and_a_second_write_replaces(tmp_path):
    for step in (1_000_000, 2, 10):
        write(tmp_path, step, [TWO_TURNS])
    write(tmp_path, 2, [FAILED])
    write(tmp_path, 2, [FAILED], name="eval")
    (tmp_path / ".step_000003.parquet.tmp").write_text("killed while writing")
    (tmp_path / "my_notes.txt").write_text("of the user")
    assert list(journal_steps(tmp_path)) == [2, 10, 1_000_000]
    check_same(read_journal(journal_steps(tmp_path)[2]), [FAILED])
    assert list(journal_steps(tmp_path, "eval")) == [2]


def test_a_few_samples(tmp_path):
    """The samples are 16 from the best to the worst and 16 that failed, in their order; the columns go with
    their samples."""
    ts = [FAILED if i % 10 == 0 else rewarded(float(i % 97), sample_index=i) for i in range(400)]
    finished = [t for t in ts if t.ok]
    batch = replace(
        Batch.of(finished), values=np.repeat([t.sample_index for t in finished], 3).astype(np.float32)
    )
    trained = Trained(batch=batch, schedule=[[list(range(len(finished)))]], first_update=0)
    table = read_table(write(tmp_path, 1, ts, mode="sample", trained=trained))
    rows = table.to_pylist()
    kept = [row["sample_index"] for row in rows if row["reward"] is not None]
    assert len(rows) == 32 and len(kept) == 16 and kept == sorted(kept)
    assert {0.0, 96.0} < {row["reward"] for row in rows}
    assert all(row["values"] == [row["sample_index"]] * 3 for row in rows if row["reward"] is not None)
    assert num_samples(table) == 400


def test_mode_off_writes_nothing(tmp_path):
    journal = Journal(tmp_path, mode="off")
    assert journal.write(1, [TWO_TURNS]) is None
    journal.close()
    assert not list(tmp_path.iterdir())


class Gate:
    """Decoder that waits until it is opened, like the slowest disk."""

    def __init__(self):
        self.open = threading.Event()

    def __call__(self, ids, after):
        assert self.open.wait(60)
        return ""


def test_the_run_does_not_wait_for_its_journal_until_the_queue_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PATIENCE", 0.01)
    gate, said, finished = Gate(), queue.Queue(), threading.Event()
    journal = Journal(tmp_path, decode=gate, report=said.put)

    def run():
        for step in range(1, 7):
            journal.write(step, [TWO_TURNS])
        finished.set()

    thread = threading.Thread(target=run)
    thread.start()
    text = said.get(timeout=60)  # the fourth step found the queue full
    assert str(tmp_path) in text and "--logger.rollouts sample" in text
    assert not finished.is_set() and not journal_steps(tmp_path)
    gate.open.set()
    thread.join()
    journal.close()
    assert said.empty() and list(journal_steps(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_what_was_flushed_is_there(tmp_path):
    journal = Journal(tmp_path)
    journal.flush()
    for step in (1, 2):
        journal.write(2 * step - 1, [TWO_TURNS] * 500)
        journal.write(2 * step, [TWO_TURNS])
        journal.flush()
        assert list(journal_steps(tmp_path)) == list(range(1, 2 * step + 1))
    journal.close()
    journal.write(5, [TWO_TURNS])
    journal.flush()
    assert list(journal_steps(tmp_path)) == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_journal_and_not_the_run(tmp_path, monkeypatch):
    """Whole steps stay, the half one is removed, and one message has path and reason."""
    full = threading.Event()

    def fsync(fd):
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("openrlhf.files.os.fsync", fsync)
    said = []
    journal = Journal(tmp_path, report=said.append)
    journal.write(1, [TWO_TURNS])
    journal.close()
    full.set()
    for step in range(2, 10):
        journal.write(step, [TWO_TURNS])
    journal.close()
    assert journal.write(11, [TWO_TURNS]) is None
    (text,) = said
    assert f"{tmp_path}/step_000002.parquet: {os.strerror(errno.ENOSPC)}" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001.parquet"]


def test_a_folder_that_is_gone_is_such_a_disk(tmp_path):
    said = []
    journal = Journal(tmp_path / "gone", report=said.append)
    journal.write(1, [TWO_TURNS])
    journal.close()
    assert os.strerror(errno.ENOENT) in said[0]


def test_any_other_error_is_raised_by_the_next_call(tmp_path):
    def broken(ids, after):
        raise ZeroDivisionError("in the tokenizer")

    journal = Journal(tmp_path, decode=broken)
    journal.write(1, [TWO_TURNS])
    with pytest.raises(ZeroDivisionError, match="in the tokenizer"):
        journal.flush()
    journal.close()
    assert not list(tmp_path.iterdir())
    journal = Journal(tmp_path, decode=broken)
    with pytest.raises(ZeroDivisionError):
        for step in range(1000):
            journal.write(step, [TWO_TURNS])
    journal.close()
    journal = Journal(tmp_path, decode=broken)
    journal.write(1, [TWO_TURNS])
    with pytest.raises(ZeroDivisionError):
        journal.close()


@pytest.mark.parametrize(
    ("mode", "samples", "filtered"), [("full", 100, 60), ("sample", 32, 16), ("off", None, None)]
)
def test_an_observer_keeps_what_it_is_told_to_keep(tmp_path, capsys, mode, samples, filtered):
    """The journal is complete once the observer is closed; the message about failures names a file only if
    there is one."""
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, PPOLoggerConfig(rollouts=mode), decode=DECODE)
    ts = [TWO_TURNS] * 60 + [FAILED] * 40
    batch = Batch.of(ts[:60])
    trained = Trained(batch=batch, schedule=[[[*range(60)]]], first_update=6)
    records.record_of(observer).write(1, ts, trained=trained)
    records.record_of(observer).write(1, ts[:60], name="filtered")
    observer.close()
    assert ("| step_000001.parquet" in capsys.readouterr().out) == (samples is not None)
    files = {name: journal_steps(folder.rollouts_path, name) for name in ("step", "filtered")}
    if samples is None:
        assert not any(files.values())
        return
    table = read_table(files["step"][1])
    assert len(table) == samples and len(read_table(files["filtered"][1])) == filtered
    assert {*map(str, table["optimizer_steps"].to_pylist())} == {"[7]", "None"}


def test_a_guest_that_fails_at_the_end_stops_no_other(tmp_path):
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, PPOLoggerConfig())
    failing = Hook()
    failing.closing = lambda: 1 / 0
    observer.guests = [failing, *observer.guests, failing]
    observer.evaluated(Evaluation(step=3, version=2, samples=[TWO_TURNS], metrics={}))
    with pytest.raises(ZeroDivisionError):
        observer.close()
    assert list(journal_steps(folder.rollouts_path, "eval")) == [3]
    assert observer.trackers._record._file.closed


def write_for_ever(folder: Path) -> None:
    journal = Journal(folder)
    for step in range(1, 1_000_000):
        journal.write(step, [TWO_TURNS] * 1000)


@pytest.mark.processes
def test_a_killed_writer_leaves_whole_steps(tmp_path):
    """The writer is killed while it writes one step after the other: every file is whole, up to the last
    one."""
    process = FORKSERVER.Process(target=write_for_ever, args=[tmp_path], daemon=True)
    process.start()
    while len(journal_steps(tmp_path)) < 4 or not list(tmp_path.glob(".*.tmp")):
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    steps = journal_steps(tmp_path)
    assert list(steps) == list(range(1, len(steps) + 1))
    assert {len(read_journal(path)) for path in steps.values()} == {1000}


def test_images_are_kept_by_name():
    """Journals of older versions do not record what the images were."""
    pixels = bytes(range(256)) * 100
    some = [
        replace(records.trajectory(), images=(Image("a.png", pixels), Image("sha256:1", pixels))),
        records.trajectory(),
    ]
    table = to_table(some, ["", ""])
    assert table["images"].to_pylist() == [["a.png", "sha256:1"], []] and table.nbytes < len(pixels)
    assert to_trajectories(table)[0].images == (Image("a.png", b""), Image("sha256:1", b""))
    assert [t.images for t in to_trajectories(table.drop_columns("images"))] == [(), ()]


def test_truncated_sampling_is_recorded(tmp_path):
    """The support of top-p/top-k sampling comes back as it was; samples of the whole vocabulary and failed
    ones have none, and neither have journals without the columns."""
    kept = records.kept_sets([20, 21], [21], [], shares=[0.5, 1.0, 1.0])
    path = write(tmp_path, 1, [replace(TWO_TURNS, kept=kept), FAILED, TWO_TURNS])
    first, *others = read_journal(path)
    assert records.sets_of(first.kept, 3) == [[20, 21], [21], []]
    np.testing.assert_array_equal(first.kept.log_masses, kept.log_masses)
    assert [t.kept for t in others] == [None, None]
    old = read_table(path).drop_columns(["kept_ids", "kept_counts", "kept_log_masses"])
    assert [t.kept for t in to_trajectories(old)] == [None] * 3
