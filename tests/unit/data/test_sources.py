import gzip
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from row_files import FLAG, ROWS, WRITERS, load, write_lines

from openrlhf.config.checks import split_spec
from openrlhf.data.bad_rows import read_value
from openrlhf.data.sources import check_columns, load_rows, rows_digest
from openrlhf.errors import ErrorCode


@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_column_names_the_flag_the_columns_and_the_near_one(tmp_path, name):
    WRITERS[name](tmp_path / name)
    for read in (load_rows, check_columns):
        with refused(ErrorCode.MISSING_COLUMN, flag="--data.input_key", value="inptu") as told:
            read(str(tmp_path / name), flag=FLAG, required_columns={"--data.input_key": "inptu"})
        assert told.value.text.splitlines()[1:] == ["Its columns: input, label", "Did you mean input?"]


def test_a_column_of_images_may_begin_behind_the_first_rows(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [ROWS[0]] * 150 + [ROWS[0] | {"images": ["x.png"]}])
    required = {"--data.input_key": "input", "--data.image_key": "images"}
    check_columns(str(file), flag=FLAG, required_columns=required)
    with refused(ErrorCode.MISSING_COLUMN, flag="--data.image_key", value="pictures"):
        check_columns(str(file), flag=FLAG, required_columns=required | {"--data.image_key": "pictures"})


def test_a_column_of_two_types_is_refused_with_both_rows(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [*[{"input": "a", "label": "1"}] * 500, {"input": "a", "label": 1}]
    )
    with refused(ErrorCode.INVALID_ROW, flag="--data.label_key", value="label") as told:
        load(path, columns=("input", "label"))
    assert f"{path}:501" in told.value.text and f"{path}:1." in told.value.text
    assert len(load(path)) == 501  # the column was not asked for


def test_two_datasets_must_agree_on_the_type_of_a_column(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"label": "1"}])
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "b.parquet")
    with refused(ErrorCode.INVALID_ROW, flag="--data.label_key", value="label") as told:
        load(f"{tmp_path}/a.jsonl,{tmp_path}/b.parquet", columns=("label",))
    assert f"{tmp_path}/b.parquet:1" in told.value.text and f"{tmp_path}/a.jsonl:1" in told.value.text


def test_devices_and_pipes_are_no_datasets(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in ("/dev/null", tmp_path / "pipe.jsonl"):
        with refused(ErrorCode.UNSUPPORTED, flag=FLAG, value=place):
            load(place)


def test_a_missing_file_is_reported_with_near_names(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "trian.jsonl") as told:
        load(tmp_path / "trian.jsonl")
    assert told.value.text.endswith(": train.jsonl")
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told=f"folder {tmp_path / 'nowhere'}"):
        load(tmp_path / "nowhere" / "train.jsonl")


def test_a_hub_name_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value="no-such-org/rows"):
        load("no-such-org/rows")
    check_columns("no-such-org/rows", flag=FLAG, required_columns={"--data.input_key": "input"})


def test_rows_of_the_hub_are_asked_for_as_the_flag_says(monkeypatch):
    asked = []

    def load(name, **options):
        asked.append((name, options))
        return datasets.Dataset.from_list([{"input": name}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for flag in ("org/rows", "org/rows@part/of/it"):
        assert len(load_rows(flag, flag="--data.dataset", required_columns={}, split="test")) == 1
    folders = [None, "part/of/it"]
    assert asked == [("org/rows", {"data_dir": folder, "split": "test"}) for folder in folders]
    digests = [rows_digest(spec, flag=FLAG) for spec in ("org/a", "org/a", "org/b", "org/a,org/b")]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_commas_and_at_signs_of_existing_paths(tmp_path):
    odd = tmp_path / "a,b@c"
    odd.mkdir()
    write_lines(odd / "x,y.jsonl", ROWS)
    write_lines(tmp_path / "z.jsonl", ROWS[:1])
    assert split_spec(f"{odd}/x,y.jsonl, {tmp_path}/z.jsonl") == [f"{odd}/x,y.jsonl", f"{tmp_path}/z.jsonl"]
    assert len(load(f"{odd}/x,y.jsonl, {tmp_path}/z.jsonl")) == 4
    assert len(load(odd)) == 3


def test_data_dir_is_a_folder_inside(tmp_path):
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "rows.jsonl", ROWS)
    assert len(load(f"{tmp_path}@sub")) == 3
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=f"{tmp_path}@bus"):
        load(f"{tmp_path}@bus")


def test_descriptions_of_a_data_set_are_no_rows(tmp_path):
    """As the hub's folders have them, and as `datasets` leaves them out."""
    write_lines(tmp_path / "0000.jsonl", ROWS)
    for name in ("dataset_infos.json", "dataset_info.json", "config.json"):
        (tmp_path / name).write_text('{"default": {"splits": {"train": {"num_examples": 3}}}}')
    assert list(load(tmp_path)) == ROWS


def test_splits_of_folders(tmp_path):
    write_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    write_lines(tmp_path / "test.jsonl", ROWS[:1])
    rows = load(tmp_path)
    assert list(rows) == ROWS
    assert rows.origin(2) == f"{tmp_path}/train-00001-of-00002.jsonl:2"
    assert len(load(tmp_path, split="test")) == 1
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path, told=("'dev'", "test, train")):
        load(tmp_path, split="dev")
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)
    )
    saved.save_to_disk(tmp_path / "saved")
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "saved", told=("'dev'", "test, train")):
        load(tmp_path / "saved", split="dev")
    (tmp_path / "bare").mkdir()
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "bare"):
        load(tmp_path / "bare")


def test_a_split_whose_name_begins_with_that_of_another(tmp_path):
    names = ("train_sft-00000-of-00001", "train_gen-00000-of-00001", "test_sft")
    for i, name in enumerate(names):
        write_lines(tmp_path / f"{name}.jsonl", ROWS[i : i + 1])
    assert [list(load(tmp_path, split=name[:9])) for name in names] == [[row] for row in ROWS]
    assert list(load(tmp_path, split="Train")) == list(load(tmp_path)) == [ROWS[1], ROWS[0]]


def test_each_file_of_a_folder_is_read_once_also_behind_links(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere" / "b.jsonl", ROWS[1:])
    (folder := tmp_path / "rows").mkdir()
    write_lines(folder / "a.jsonl", ROWS[:1])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"input": "packed"}'))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "linked" / "back").symlink_to(folder)
    assert list(load(folder)) == ROWS
    assert "a.jsonl.gz: not read, because a.jsonl is there" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["state.json", "*.arrow", "cut"])
def test_a_damaged_saved_dataset_is_named(tmp_path, damage):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow" if damage == "cut" else damage)
    content = file.read_bytes()
    file.unlink()
    if damage != "*.arrow":
        file.write_bytes(content[:50] if damage == "cut" else b"{}")
    with refused(ErrorCode.UNREADABLE, flag=FLAG, value=tmp_path, told="Save the dataset again"):
        load(tmp_path)


def test_a_row_function_may_change_its_row(tmp_path):
    (tmp_path / "own.py").write_text("def own(row):\n    row['input'] += '!'\n    return row\n")
    given = [dict(ROWS[0])]
    rows = load_rows(given, flag=FLAG, required_columns={}, row_func=f"{tmp_path}/own.py:own")
    assert [rows[0]["input"], rows[0]["input"]] == ["a!", "a!"] and given == ROWS[:1]


def test_rows_in_memory_are_those_that_were_chosen_and_files_in_them_stay_encoded():
    file = {"bytes": b"xx", "path": None}
    images, sound = datasets.List({"image": datasets.Image()}), datasets.Audio()
    features = datasets.Features({"input": datasets.Value("string"), "parts": images, "sound": sound})
    rows = [{"input": str(i), "parts": [{"image": file}], "sound": file} for i in range(4)]
    table = pa.Table.from_pylist(rows, schema=features.arrow_schema)
    whole = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
    chosen = whole.select([3, 1])
    for given in (chosen, chosen.with_format("numpy", columns=["input"]), datasets.DatasetDict(train=chosen)):
        assert list(load_rows(given, flag=FLAG, required_columns={})) == [rows[3], rows[1]]
    table = chosen.remove_columns("sound").to_pandas()
    assert next(iter(load_rows(table, flag=FLAG, required_columns={})))["parts"] == rows[3]["parts"]
    with refused(ErrorCode.UNSUPPORTED, told="method map"):
        load_rows(chosen.with_transform(dict), flag=FLAG, required_columns={})
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told="no split"):
        load_rows(datasets.DatasetDict(test=chosen), flag=FLAG, required_columns={})


def test_a_slice_of_a_split_is_refused_where_nothing_reads_it(tmp_path):
    write_lines(tmp_path / "rows.jsonl", ROWS)
    with refused(ErrorCode.NOT_FOUND, flag=FLAG, told="max_samples"):
        load(tmp_path / "rows.jsonl", split="train[:1]")


def test_a_link_to_nothing_is_no_file_less(tmp_path):
    """As a cache leaves them from which files were removed."""
    write_lines(tmp_path / "train-0.jsonl", ROWS)
    for name in ("train-1.jsonl.gz", "test.jsonl", ".rows.jsonl", "rows.txt"):
        (tmp_path / name).symlink_to("../blobs/1a2b")
    for read in (load, lambda place: rows_digest(str(place), flag=FLAG), check_links):
        with refused(ErrorCode.NOT_FOUND, flag=FLAG, value=tmp_path / "train-1.jsonl.gz", told=("1a2b",)):
            read(tmp_path)
    (tmp_path / "train-1.jsonl.gz").unlink()
    assert list(load(tmp_path)) == ROWS  # the links of another split and of other files are not read
    (tmp_path / "train-1.jsonl").symlink_to("train-0.jsonl")
    assert list(load(tmp_path)) == ROWS * 2


def check_links(place):
    check_columns(str(place), flag=FLAG, required_columns={})


def test_files_that_others_count_and_that_are_not_there_are_noted(tmp_path, capsys):
    for name in ("train-00000-of-00003", "train-00002-of-00003", "test-00000-of-00001"):
        write_lines(tmp_path / f"{name}.jsonl", ROWS)
    assert len(load(tmp_path, split="test")) == 3
    assert "are there and read" not in capsys.readouterr().err
    assert len(load(tmp_path)) == 6
    assert f"note: {FLAG} {tmp_path}: 2 of the 3 files of train are there and read" in capsys.readouterr().err


def test_concatenation_and_caps(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(4)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(4)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    assert [row["input"] for row in load(both)] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert [row["input"] for row in load(both, max_samples=3)] == ["a0", "a1", "a2"]
    assert [row["input"] for row in load(both, max_samples=3, probs="0.5,0.5")][:3] != ["a0", "a1", "a2"]


@pytest.mark.processes
def test_mixing_repeats_the_shorter_dataset_until_all_are_used_up(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(300)])
    write_lines(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(300)])
    both = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    mixed = [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert len({*mixed}) == 600
    assert sum(text[0] == "a" for text in mixed) / len(mixed) == pytest.approx(0.75, abs=0.05)
    assert mixed == [row["input"] for row in load(both, probs="0.75,0.25", seed=1)]
    assert mixed != [row["input"] for row in load(both, probs="0.75,0.25", seed=2)]


@pytest.mark.parametrize("name", WRITERS)
def test_the_digest_is_that_of_the_content(tmp_path, name):
    for folder in ("one", "two", "other"):
        (tmp_path / folder).mkdir()
        WRITERS[name](tmp_path / folder / name)

    def digest(folder):
        return rows_digest(str(tmp_path / folder / name), flag=FLAG)

    if (tmp_path / "one" / name).is_file():
        assert digest("one") == digest("two")
    assert digest("one") == digest("one")
    last = max((tmp_path / "other").rglob("*"), key=lambda path: (path.is_file(), path.suffix == ".arrow"))
    last.write_bytes(last.read_bytes() + b" ")
    assert digest("other") != digest("one")


def test_the_digest_knows_the_order_of_files_and_the_split(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS[:1])
    write_lines(tmp_path / "test.jsonl", ROWS[1:])
    files = [f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"]
    specs = [",".join(files), ",".join(files[::-1]), *files]
    assert len({rows_digest(spec, flag=FLAG) for spec in specs}) == 4
    assert rows_digest(str(tmp_path), flag=FLAG) == rows_digest(files[0], flag=FLAG)
    assert rows_digest(str(tmp_path), flag=FLAG, split="test") == rows_digest(files[1], flag=FLAG)


@pytest.mark.parametrize(
    "hidden",
    [
        ".ipynb_checkpoints/rows-checkpoint.jsonl",
        "__pycache__/rows.jsonl",
        "__MACOSX/rows.jsonl",
        "more/.git/rows.jsonl",
        "._rows.jsonl",
        "dataset_infos.json",
    ],
)
def test_files_that_datasets_leaves_out_are_no_rows_of_a_folder(tmp_path, hidden):
    """Unless they are named, or the folder that they are in."""
    write_lines(tmp_path / "rows.jsonl", ROWS)
    before = rows_digest(str(tmp_path), flag=FLAG)
    (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
    write_lines(tmp_path / hidden, ROWS[:1])
    assert len(load(tmp_path)) == 3
    assert len(load(tmp_path.as_uri())) == 3
    assert rows_digest(str(tmp_path), flag=FLAG) == before
    if hidden.endswith(".jsonl"):
        assert len(load(tmp_path / hidden)) == 1
    if "/" in hidden:
        assert (
            len(load((tmp_path / hidden).parent)) == len(load(f"{tmp_path}@{hidden.rpartition('/')[0]}")) == 1
        )


def test_a_file_whose_name_begins_with_two_underscores_is_read_as_datasets_does(tmp_path):
    write_lines(tmp_path / "__rows.jsonl", ROWS)
    assert len(load(tmp_path)) == len(datasets.load_dataset(str(tmp_path), split="train")) == 3


def test_a_text_that_no_memory_tokenises_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.data.bad_rows.MAX_TEXT", 10)
    assert read_value({"input": "x" * 10}, "input", str)
    assert read_value({"label": "x" * 11}, "label")
    with refused(ErrorCode.INVALID_ROW):
        read_value({"input": "x" * 11}, "input", str)


def test_files_without_a_split_beside_others_with_one_are_noted(tmp_path, capsys):
    for name in ("train_code", "math", "science"):
        write_lines(tmp_path / f"{name}.jsonl", ROWS[:1])
    assert len(load(tmp_path)) == len(datasets.load_dataset(str(tmp_path), split="train")) == 1
    told = f"note: {FLAG} {tmp_path}: 2 files not read, because other names have a split: math.jsonl"
    assert told in capsys.readouterr().err
