import errno
import json
import os
import shutil
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import FORKSERVER
from refusals import refused
from transformers import PreTrainedTokenizer

from openrlhf.config.commands import SFT
from openrlhf.config.parse import parse
from openrlhf.data import cache
from openrlhf.data.cache import arrays_digest, cached, digest, file_digest, sampled_digest, tokenizer_digest
from openrlhf.data.store import SampleStore
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised.datasets import build_train_set
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.models.configurations import model_digest, model_fingerprint
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.tasks.tiny_model import CHAT_TEMPLATE, tiny_chat_model, tiny_tokenizer
from openrlhf.text import Calendar

KEY = {"rows": "abc", "options": {"max_len": 8}}


def samples(*lists):
    store = SampleStore()
    for token_ids in lists:
        store.append(token_ids, [i % 2 == 1 for i in range(len(token_ids))])
    store.skipped["bad row"], store.needed_len = 3, 9
    store.truncated = 1
    return store


class Builder:
    """Builder that counts its calls."""

    def __init__(self, *lists):
        self.lists = lists
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return samples(*self.lists)


def build(folder, builder, key=None, **options):
    return cached(SampleStore, key or KEY, builder, cache_dir=str(folder), **options)


def contents(store):
    return [(sample.token_ids.tolist(), sample.action_mask.tolist()) for sample in store]


def entry_of(folder) -> Path:
    (entry,) = (path for path in folder.iterdir() if path.is_dir())
    return entry


def test_the_second_time_nothing_is_built_and_everything_is_the_same(tmp_path, capsys):
    builder = Builder([5, 6, 7], [8], [2**31 - 1, 0])
    first = build(tmp_path, builder)
    again = build(tmp_path, builder)
    entry = entry_of(tmp_path)
    said = capsys.readouterr().err
    assert [line.endswith(f" {entry}") for line in said.splitlines()] == [True, True]
    assert builder.calls == 1
    for store in (first, again):
        assert contents(store) == contents(samples(*builder.lists))
        assert list(store.lengths) == [3, 1, 2]
        assert (store.skipped, store.needed_len) == ({"bad row": 3}, 9)
        assert store.truncated == 1
        assert store[0].token_ids.dtype == torch.int64


def test_what_is_read_is_a_map_of_the_file(tmp_path):
    for store in (build(tmp_path, Builder([1, 2])), build(tmp_path, Builder([1, 2]))):
        assert isinstance(store.arrays()["token_ids"].base, np.memmap)
        assert not store.arrays()["token_ids"].flags.writeable


def test_a_sample_of_a_map_may_be_written_to(tmp_path):
    store = build(tmp_path, Builder([1, 2]))
    store[0].token_ids[0] = 9
    assert store[0].token_ids.tolist() == [1, 2]


def test_every_part_of_the_key_makes_another_entry(tmp_path):
    keys = [KEY, KEY | {"rows": "abd"}, KEY | {"options": {"max_len": 9}}, KEY | {"more": None}]
    for i, key in enumerate(keys):
        assert contents(build(tmp_path, Builder([i]), key)) == [([i], [False])]
    for i, key in enumerate(keys):
        assert contents(build(tmp_path, Builder(), key)) == [([i], [False])]


def test_another_kind_of_dataset_and_other_code_make_another_entry(tmp_path, monkeypatch):
    class Other(SampleStore):
        pass

    build(tmp_path, Builder([1]))
    builder = Builder([2])
    cached(Other, KEY, builder, cache_dir=str(tmp_path))
    assert builder.calls == 1
    monkeypatch.setattr("openrlhf.data.cache._versions", lambda: {"code": "of tomorrow"})
    build(tmp_path, builder)
    assert builder.calls == 2


def test_an_entry_says_what_it_was_made_of(tmp_path):
    build(tmp_path, Builder([1, 2]), source="train.jsonl")
    about = json.loads((entry_of(tmp_path) / "meta.json").read_text())
    assert about["source"] == "train.jsonl"
    assert about["kind"] == "SampleStore"
    assert about["made_of"]["options"] == {"max_len": 8}
    assert set(about["made_of"]["versions"]) == {"code", "tokenizers", "transformers"}
    assert about["meta"] == {"dropped": {"bad row": 3}, "needed_len": 9, "truncated": 1}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def other_shape(path):
    np.save(path, np.zeros(1, np.int32))


DAMAGES = {
    "cut array": ("token_ids.npy", cut),
    "empty array": ("starts.npy", lambda path: path.write_bytes(b"")),
    "array of another shape": ("action_mask.npy", other_shape),
    "array with objects": ("token_ids.npy", lambda path: np.save(path, np.array([{}]), allow_pickle=True)),
    "no array": ("token_ids.npy", Path.unlink),
    "no description": ("meta.json", Path.unlink),
    "half a description": ("meta.json", cut),
    "a description of something else": ("meta.json", lambda path: path.write_text("[]")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_named_and_built_again(tmp_path, caplog, name):
    build(tmp_path, Builder([1, 2, 3]))
    file, damage = DAMAGES[name]
    damage(entry_of(tmp_path) / file)
    builder = Builder([1, 2, 3])
    assert contents(build(tmp_path, builder)) == contents(samples([1, 2, 3]))
    assert builder.calls == 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{entry_of(tmp_path)}: damaged (")
    build(tmp_path, builder)
    assert builder.calls == 1


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path):
    build(tmp_path, Builder([1]))
    entry = entry_of(tmp_path)
    left = entry.rename(entry.with_name(f".{entry.name}.tmp"))
    cut(left / "token_ids.npy")
    assert contents(build(tmp_path, Builder([1]))) == [([1], [False])]
    assert entry_of(tmp_path) == entry


def test_a_failure_to_build_leaves_nothing_and_frees_the_lock(tmp_path):
    def fails():
        raise ValueError("row 3 is bad")

    with pytest.raises(ValueError, match="row 3 is bad"):
        build(tmp_path, fails)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert contents(build(tmp_path, Builder([1]))) == [([1], [False])]


def _build_slowly(folder, local_rank, barrier, answers):
    os.environ["LOCAL_RANK"] = local_rank
    builds = 0

    def slowly():
        nonlocal builds
        builds += 1
        time.sleep(0.3)
        return samples(*([i, i] for i in range(100)))

    barrier.wait()
    store = build(Path(folder), slowly)
    answers.put((builds, digest(contents(store))))


@pytest.mark.processes
@pytest.mark.parametrize("local_ranks", [("0", "0", "0"), ("1", "0", "2")])
def test_of_processes_at_once_one_builds_and_all_read_the_same(tmp_path, local_ranks):
    barrier, answers = FORKSERVER.Barrier(len(local_ranks)), FORKSERVER.Queue()
    processes = [
        FORKSERVER.Process(target=_build_slowly, args=(str(tmp_path), rank, barrier, answers), daemon=True)
        for rank in local_ranks
    ]
    for process in processes:
        process.start()
    builds, found = zip(*(answers.get(timeout=120) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert sum(builds) == 1
    assert set(found) == {digest(contents(samples(*([i, i] for i in range(100)))))}


def test_a_folder_that_cannot_be_written_is_an_error_where_somebody_named_it(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    with refused(ErrorCode.NOT_WRITABLE, flag="--data.cache_dir", value=folder) as told:
        build(folder, Builder([1]))
    assert "--data.no_cache_enable" in told.value.text


def test_other_code_that_makes_tokens_has_another_version(tmp_path, monkeypatch):
    source = Path(cache.__file__).parent
    shutil.copytree(source, tmp_path / "data")
    for name in ("text.py", "types.py"):
        shutil.copy(source.parent / name, tmp_path)
    version = lambda: cache._versions.__wrapped__()["code"]  # not the one of an earlier call
    monkeypatch.setattr(cache, "__file__", f"{tmp_path}/data/cache.py")
    found = [version()]
    for file in ("data/sft.py", "text.py", "types.py"):
        with (tmp_path / file).open("a") as code:
            code.write("# changed\n")
        found.append(version())
    monkeypatch.undo()
    assert version() == found[0] and len(set(found)) == 4


def test_the_first_process_of_a_machine_starts_first(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(cache.time, "sleep", slept.append)
    for rank, expected in (("0", []), ("1", [cache.HEAD_START])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        build(tmp_path / rank, Builder([1]))
        assert slept == expected


def test_an_entry_that_cannot_be_written_is_told_with_its_place(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.np, "save", full)
    assert contents(build(tmp_path, Builder([1]))) == [([1], [False])]
    (message,) = caplog.messages
    assert str(tmp_path) in message and os.strerror(errno.ENOSPC) in message and "--data.cache_dir" in message


def test_a_default_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENRLHF_CACHE", f"{tmp_path}/file")
    assert contents(cached(SampleStore, KEY, Builder([1]))) == [([1], [False])]
    (message,) = caplog.messages
    assert f"{tmp_path}/file/datasets" in message and "--data.no_cache_enable" in message


def test_a_fingerprint_changes_with_the_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    (tmp_path / "config.json").write_text("{}")
    before = [digest_of(str(tmp_path), "--model") for digest_of in (model_fingerprint, model_digest)]
    assert before == [digest_of(str(tmp_path), "--model") for digest_of in (model_fingerprint, model_digest)]
    (tmp_path / "model.safetensors").write_bytes(bytes([1] * 10**6))
    after = [digest_of(str(tmp_path), "--model") for digest_of in (model_fingerprint, model_digest)]
    assert len({*before, *after}) == 4


def test_the_digest_of_arrays_is_that_of_names_layouts_and_contents():
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    same = arrays_digest({"a": rows, "b": rows[0]})
    assert same == arrays_digest({"b": rows[0].copy(), "a": np.asfortranarray(rows)})
    others = ({"a": rows}, {"a": rows, "c": rows[0]}, {"a": rows.reshape(4, 3), "b": rows[0]})
    kinds = ({"a": rows.astype(np.uint32), "b": rows[0]}, {"a": rows + 1, "b": rows[0]})
    assert len({same, *map(arrays_digest, (*others, *kinds))}) == 6


def test_the_digest_of_a_file_is_that_of_its_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 10**6)
    (tmp_path / "b").write_bytes(b"abc" * 10**6)
    (tmp_path / "c").write_bytes(b"abc" * 10**6 + b"d")
    one, same, other = (file_digest(tmp_path / name) for name in "abc")
    assert one == same != other


class Letters(PreTrainedTokenizer):
    """Tokenizer in Python, without a file to hash."""

    def __init__(self, first=0, **options):
        self.first = first
        super().__init__(eos_token="$", **options)

    @property
    def vocab_size(self):
        return 128

    def get_vocab(self):
        return {chr(i): i + self.first for i in range(128)} | self.added_tokens_encoder

    def _tokenize(self, text, **options):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]


def changed(change):
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    return tokenizer_digest(tokenizer)


def test_the_digest_of_a_tokenizer_is_that_of_what_it_does():
    changes = {
        "nothing": lambda t: None,
        "a token": lambda t: t.add_tokens(["<new>"]),
        "a special token": lambda t: t.add_tokens(["<new>"], special_tokens=True),
        "the end": lambda t: setattr(t, "eos_token", "<|user|>"),
        "the template": lambda t: setattr(t, "chat_template", t.chat_template + " "),
        "no template": lambda t: setattr(t, "chat_template", None),
        "the normaliser": lambda t: setattr(
            t.backend_tokenizer, "normalizer", __import__("tokenizers").normalizers.Lowercase()
        ),
    }
    digests = {name: changed(change) for name, change in changes.items()}
    assert len(set(digests.values())) == len(changes)
    assert changed(lambda t: t("hi", truncation=True, max_length=1)) == digests["nothing"]
    assert changed(lambda t: setattr(t, "name_or_path", "elsewhere")) == digests["nothing"]


def test_a_template_that_writes_the_date_is_another_one_tomorrow(monkeypatch):
    def both():
        return [
            changed(lambda t: setattr(t, "chat_template", "{{ strftime_now('%Y') }}")),
            changed(lambda t: setattr(t, "chat_template", "{{ messages }}")),
        ]

    dated, plain = both()
    monkeypatch.setattr(Calendar, "today", date(2100, 1, 1))
    dated_tomorrow, plain_tomorrow = both()
    assert dated != dated_tomorrow
    assert plain == plain_tomorrow


CHANGES = (
    ["--data.max_len", "33"],
    ["--data.max_samples", "1"],
    ["--data.input_key", "output"],
    ["--data.apply_chat_template", "false"],
    ["--data.apply_chat_template", "false", "--data.input_template", "{}!"],
    ["--data.bad_rows", "skip"],
    ["--data.tokenizer_chat_template", CHAT_TEMPLATE.replace("<|end|>", "<|end|> ")],
    ["--model.pretrain_mode_enable", "--data.apply_chat_template", "false", "--data.output_key", "None"],
    ["--train.seed", "7"],
)


@pytest.fixture(scope="module")
def sft_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tiny_chat_model(folder / "model", hidden_size=32, num_layers=1)
    (folder / "rows.jsonl").write_text('{"input": "1+2", "output": "3"}\n{"input": "2+2", "output": "4"}\n')
    flags = f"--model.model_name_or_path {folder}/model --data.dataset {folder}/rows.jsonl"
    return f"{flags} --data.apply_chat_template --data.output_key output --data.max_len 32".split()


def train_set(flags):
    task = SFTTask(parse(SFT, flags).config)
    return build_train_set(task, load_run_tokenizer(task.config))


def test_a_command_finds_its_data_again(tmp_path, sft_flags, capsys):
    flags = [*sft_flags, "--data.cache_dir", str(tmp_path)]
    for change in ([], *CHANGES):
        first = train_set([*flags, *change])
        assert "kept in" in capsys.readouterr().err, change
        again = train_set([*flags, *change, "--train.batch_size", "8"])
        assert "read from the cache" in capsys.readouterr().err
        assert contents(again) == contents(first)
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 1 + len(CHANGES)


def test_other_rows_in_the_same_file_are_other_data(tmp_path, sft_flags):
    path = tmp_path / "rows.jsonl"
    flags = [*sft_flags, "--data.dataset", str(path), "--data.cache_dir", str(tmp_path / "cache")]
    lengths = []
    for answer in ("3", "3 3", "3 3 3"):
        path.write_text(json.dumps({"input": "1+2", "output": answer}) + "\n")
        lengths.append(train_set(flags)[0].length)
    assert lengths[0] < lengths[1] < lengths[2]


def test_without_the_cache_nothing_is_written(tmp_path, sft_flags, monkeypatch):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path))
    store = train_set([*sft_flags, "--data.no_cache_enable"])
    assert list(tmp_path.iterdir()) == []
    assert contents(store) == contents(train_set(sft_flags))
    assert list(tmp_path.iterdir()) != []


def test_the_digest_of_a_slow_tokenizer_knows_its_vocabulary():
    digests = [tokenizer_digest(tokenizer) for tokenizer in (Letters(), Letters(), Letters(first=1))]
    assert digests[0] == digests[1] != digests[2]


def test_samples_of_a_file_tell_trained_weights_from_untrained(tmp_path):
    """4 MB count as trained if a quarter anywhere was trained; a file smaller than one sample is hashed
    whole."""
    weights = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)
    paths = [tmp_path / name for name in ("base", "copy", "trained", "longer", "small", "smaller")]
    trained = weights.copy()
    trained[1 << 20 : 1 << 21] ^= 1
    for path, content in zip(
        paths, (weights, weights, trained, np.append(weights, 0), weights[:7], weights[:6]), strict=True
    ):
        path.write_bytes(content.astype(np.uint8).tobytes())
    base, copy, *others = map(sampled_digest, paths)
    assert base == copy and len({base, *others}) == 5
