import json
from pathlib import Path

import pytest
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.tools.serve.result_file import (
    ResultFile,
    check_origin,
    finished,
    merge,
    write_origin,
)


def row(prompt_id: int, sample_index: int = 0, output: str = "ä") -> dict:
    return {"output": output, "prompt_id": prompt_id, "sample_index": sample_index}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "out.jsonl"


def test_rows_of_all_ranks_become_one_sorted_file(path: Path):
    for rank, ids in enumerate(([(2, 0), (0, 1)], [(10, 0), (0, 0)])):
        with ResultFile(path, rank) as file:
            for prompt_id, sample_index in ids:
                file.append([row(prompt_id, sample_index)])
    assert set(finished(path)) == {(2, 0), (0, 1), (10, 0), (0, 0)}
    rows = merge(path)
    assert [(r["prompt_id"], r["sample_index"]) for r in rows] == [(0, 0), (0, 1), (2, 0), (10, 0)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert list(path.parent.iterdir()) == [path]


def test_rows_are_on_disk_before_the_file_is_closed(path: Path):
    file = ResultFile(path)
    file.append([row(0)])
    assert set(finished(path)) == {(0, 0)}
    file.close()


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_half_written_last_line_is_dropped(path: Path, cut: int):
    with ResultFile(path) as file:
        file.append([row(0), row(1)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(finished(path)) == {(0, 0)}
    with ResultFile(path) as file:
        file.append([row(2)])
    assert [r["prompt_id"] for r in merge(path)] == [0, 2]


def test_a_line_of_something_else_is_reported(path: Path):
    path.parent.mkdir()
    path.write_text(json.dumps(row(0)) + '\n{"input": "mine"}\n')
    with refused(ErrorCode.INVALID_ROW, value=path, row=2):
        finished(path)


def test_a_file_made_from_something_else_is_not_continued(path: Path):
    meta = path.with_name("meta.json")
    check_origin(path, meta, {"seed": 1})
    write_origin(meta, {"seed": 1, "betas": (1, 2)})
    with ResultFile(path) as file:
        file.append([row(0)])
    check_origin(path, meta, {"seed": 1, "betas": (1, 2)})
    with refused(ErrorCode.OTHER_RUN, flag="--output_path", value=path) as told:
        check_origin(path, meta, {"seed": 2, "betas": (1, 2)})
    assert "seed was 1, is 2" in told.value.text


def test_a_file_of_unknown_origin_is_not_continued(path: Path):
    path.parent.mkdir()
    path.write_text(json.dumps(row(0)) + "\n")
    with refused(ErrorCode.OTHER_RUN, flag="--output_path", value=path):
        check_origin(path, path.with_name("meta.json"), {})


def test_at_most_three_changes_are_named(tmp_path):
    path, meta = tmp_path / "rows.jsonl", tmp_path / "meta.json"
    write_origin(meta, dict.fromkeys("abcde", 1))
    for changed, more in (("abcde", " (and 2 more)."), ("abcd", " (and 1 more)."), ("abc", "is 2.")):
        with refused(ErrorCode.OTHER_RUN, flag="--output_path") as told:
            check_origin(path, meta, dict.fromkeys("abcde", 1) | dict.fromkeys(changed, 2))
        first = told.value.text.splitlines()[0]
        assert first.count(" was 1, is 2") == 3 and first.endswith(more)
