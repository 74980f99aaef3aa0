import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import marked
from refusals import refused
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers_of_users import llama_2_style
from transformers import PreTrainedTokenizerFast

from openrlhf.data.cache import cached
from openrlhf.data.files import REMEDY
from openrlhf.data.sources import Rows
from openrlhf.data.steps import StepsDataset, build_steps, reward_token_ids
from openrlhf.errors import ErrorCode
from openrlhf.rows import StepsRow
from openrlhf.tasks.tiny_model import tiny_tokenizer

OPTIONS = {
    "input_key": "input",
    "label_key": "label",
    "placeholder_token": "#",
    "reward_tokens": ("+", "-"),
    "max_len": 64,
}
TOKENIZER = tiny_tokenizer()
ROW = {"input": "1+2=3# 3-1=1#", "label": ["+", "-"]}
PLUS, MINUS = (TOKENIZER.convert_tokens_to_ids(token) for token in "+-")


def build(rows, tokenizer=TOKENIZER, **changes):
    return build_steps(Rows.of(rows, "rows.json"), tokenizer, **(OPTIONS | changes))


def test_golden_tokens_and_labels():
    (steps,) = build([ROW])
    assert marked(steps.sample, TOKENIZER) == "1+2=3⟦#⟧ 3-1=1⟦#⟧"
    assert steps.labels.tolist() == [PLUS, MINUS]
    assert steps.labels.dtype == torch.int64
    assert steps.sample.token_ids.tolist() == TOKENIZER(ROW["input"], add_special_tokens=False)["input_ids"]
    assert steps.sample.action_mask.dtype == torch.bool


def test_probabilities_are_floats():
    for label in ([0.25, 1, 0], "[0.25, 1, 0]"):  # as CSV has it
        (steps,) = build([{"input": "1# 2# 3#", "label": label}])
        assert steps.labels.tolist() == [0.25, 1.0, 0.0]
        assert steps.labels.dtype == torch.float32


def test_without_reward_tokens_any_token_is_a_label():
    (steps,) = build([{"input": "1# 2#", "label": ["7", "<think>"]}], reward_tokens=None)
    assert steps.labels.tolist() == TOKENIZER.convert_tokens_to_ids(["7", "<think>"])


def test_a_text_is_cut_with_its_labels():
    text = "12#34#56#"
    for max_len, expected, labels in (
        (9, "12⟦#⟧34⟦#⟧56⟦#⟧", [PLUS, MINUS, PLUS]),
        (8, "12⟦#⟧34⟦#⟧56", [PLUS, MINUS]),
        (6, "12⟦#⟧34⟦#⟧", [PLUS, MINUS]),
        (5, "12⟦#⟧34", [PLUS]),
        (3, "12⟦#⟧", [PLUS]),
    ):
        dataset = build([{"input": text, "label": ["+", "-", "+"]}], max_len=max_len)
        assert marked(dataset[0].sample, TOKENIZER) == expected
        assert dataset[0].labels.tolist() == labels
        assert dataset.truncated == (max_len < 9)


def test_solutions_without_a_step_left_are_dropped_and_counted():
    rows = [ROW, {"input": "123456#", "label": ["+"]}, {"input": "12", "label": []}]
    dataset = build(rows, max_len=6)
    assert len(dataset) == 1
    assert dataset.skipped == {"no placeholder within max_len": 1, "nothing to learn": 1}
    assert len(build(rows, max_len=7)) == 2
    assert dataset.needed_len == 13 and build(rows, max_len=13).truncated == 0
    with refused(ErrorCode.NO_ROWS, value="rows.json") as told:
        build(rows[1:2], max_len=6)
    assert told.value.text.startswith("no solution is left of 1 row: 1 × no placeholder within max_len")


STEPS = st.lists(
    st.tuples(st.text("abc 12\n", min_size=1, max_size=5), st.sampled_from("+-")), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(solutions=st.lists(STEPS, min_size=1, max_size=5), max_len=st.integers(7, 40))
def test_marks_are_the_placeholders_and_labels_go_with_them(solutions, max_len):
    rows = [
        {"input": "".join(step + "#" for step, _ in steps) + "end", "label": [label for _, label in steps]}
        for steps in solutions
    ]
    dataset = build(rows, max_len=max_len)
    for row, item in zip(rows, dataset, strict=True):
        ids = TOKENIZER(row["input"], add_special_tokens=False)["input_ids"][:max_len]
        assert item.sample.token_ids.tolist() == ids
        assert item.sample.action_mask.tolist() == [TOKENIZER.decode([token]) == "#" for token in ids]
        assert len(item.labels) == item.sample.num_actions
        assert TOKENIZER.decode(item.labels) == "".join(row["label"])[: len(item.labels)]
    row = StepsRow.of(list(dataset))
    assert len(row.labels) == row.num_tokens


def test_a_token_that_is_none_is_shown_as_the_tokenizer_makes_it():
    with refused(ErrorCode.INVALID_VALUE, flag="--data.reward_tokens", value="good - ok") as told:
        build([ROW], reward_tokens=("good", "-", "ok"))
    assert "('g' 'o' 'o' 'd')" in told.value.text and "('o' 'k')" in told.value.text
    assert reward_token_ids(TOKENIZER, ["+", "-"])[0] == PLUS


@pytest.mark.parametrize("tokens", [("+",), ("+", "+"), ("+", "-", "+"), ()])
def test_reward_tokens_must_be_different(tokens):
    with refused(ErrorCode.INVALID_VALUE, flag="--data.reward_tokens", value=" ".join(tokens)):
        build([ROW], reward_tokens=tokens)


BAD = {
    "too few labels": ({"input": "1# 2#", "label": ["+"]}, {}, "1 labels for 2"),
    "too many labels": ({"input": "1#", "label": ["+", "-"]}, {}, "2 labels for 1"),
    "a placeholder at the start": ({"input": "#1", "label": ["+"]}, {}, "'#'"),
    "another token": ({"input": "1#", "label": ["7"]}, {}, "(+ -)"),
    "no token": ({"input": "1#", "label": ["good"]}, {"reward_tokens": None}, "('g' 'o' 'o' 'd')"),
    "above one": ({"input": "1# 2#", "label": [1, 1.5]}, {}, "label 2 is 1.5"),
    "not a number": ({"input": "1#", "label": [float("nan")]}, {}, "label 1 is nan"),
    "both kinds": ({"input": "1# 2#", "label": [0.5, "+"]}, {}, "label 2 is '+' (text)"),
    "truth": ({"input": "1#", "label": [True]}, {}, "label 1 is True (true or false)"),
    "null in the list": ({"input": "1#", "label": [None]}, {}, "label 1 is None (null)"),
    "not a list": ({"input": "1#", "label": "+"}, {}, "'label' is text"),
    "no text": ({"input": None, "label": []}, {}, "'input' is null"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(case, caplog):
    row, changes, reason = BAD[case]
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=2, told=(reason, REMEDY)):
        build([ROW, row], **changes)
    with caplog.at_level(logging.WARNING):
        dataset = build([ROW, row, row, row, row], **changes, bad_rows="skip")
    assert len(dataset) == 1
    assert dataset.skipped == {"bad row": 4}
    skipped = [message.partition(": ")[0] for message in caplog.messages]
    assert skipped == ["rows.json:2", "rows.json:3", "rows.json:4"]


def byte_level():
    """Makes a tokenizer like Qwen's and Llama 3's: a space belongs to the word behind it, newlines to the
    punctuation before."""
    backend = Tokenizer(models.BPE())
    split = Regex(r" ?[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+|\p{N}|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["2 + 2 = 4 <step>\n", "so it is <step>\n", "ки\n"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="\n")


TOKENIZERS = {"tiny": tiny_tokenizer(), "byte level": byte_level(), "llama 2": llama_2_style()}


@pytest.mark.parametrize("placeholder", ["<step>", "ки", "\n\n", "#"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_ends_a_step_with_any_tokenizer(name, placeholder):
    """The step is read at its last token, behind exactly the text up to there: also where the next line's
    newline, or another placeholder, would merge with it."""
    tokenizer = TOKENIZERS[name]
    text = f"2 + 2 = 4 {placeholder}\nso it is{placeholder}{placeholder} end"
    options = {"placeholder_token": placeholder, "reward_tokens": ("4", "2"), "max_len": 256}
    (item,) = build([{"input": text, "label": ["4", "2", "4"]}], tokenizer, **options)
    ids, mask = item.sample.token_ids, item.sample.action_mask
    begins = [text[: found.end()] for found in re.finditer(re.escape(placeholder), text)]
    places = mask.nonzero()[:, 0].tolist()
    plain = TOKENIZERS[name](text)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(plain)
    assert [tokenizer.decode(ids[: place + 1]) for place in places] == begins
    assert tokenizer.decode(item.labels).replace(" ", "") == "424"


def test_tokens_are_those_of_the_whole_text_where_none_reaches_beyond_a_step():
    """A server that tokenises a solution at once reads the same tokens."""
    tokenizer = llama_2_style()
    text = "2 + 2 = 4 ки\nthe answer is 4 ки\n"
    options = {"placeholder_token": "ки", "reward_tokens": ("4", "2")}
    (item,) = build([{"input": text, "label": ["4", "2"]}], tokenizer, **options)
    assert item.sample.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_one_dataset_has_one_kind_of_labels():
    rows = [ROW, {"input": "1#", "label": [0.5]}]
    for some, kinds in ((rows, ("text", "numbers")), (rows[::-1], ("numbers", "text"))):
        with refused(ErrorCode.INVALID_ROW, flag="--data.label_key", value="label") as told:
            build(some)
        found = re.findall(r"(text|numbers) at rows.json:(\d)", told.value.text)
        assert found == [(kinds[0], "1"), (kinds[1], "2")]


@pytest.mark.parametrize("tokens", [None, ("+", "-", "7")])
def test_probabilities_need_two_reward_tokens(tokens):
    with refused(ErrorCode.CONFLICT, flag="--data.label_key", value="label") as told:
        build([{"input": "1#", "label": [0.5]}], reward_tokens=tokens)
    assert "rows.json:1" in told.value.text and "--data.reward_tokens" in told.value.text


def test_lengths_are_tokens():
    dataset = build([ROW, {"input": "1#", "label": ["+"]}])
    assert list(dataset.lengths) == [item.sample.length for item in dataset] == [13, 2]


def test_a_kept_dataset_reads_the_same(tmp_path):
    rows = [ROW, {"input": "1#2", "label": ["-"]}]

    def make():
        return build(rows)

    def fail():
        raise AssertionError("built again")

    built = make()
    cached(StepsDataset, {"test": 1}, make, cache_dir=str(tmp_path))
    kept = cached(StepsDataset, {"test": 1}, fail, cache_dir=str(tmp_path))
    assert isinstance(kept.labels, np.memmap)
    assert list(kept.lengths) == list(built.lengths)
    for old, new in zip(built, kept, strict=True):
        assert marked(old.sample, TOKENIZER) == marked(new.sample, TOKENIZER)
        assert old.labels.tolist() == new.labels.tolist()
    with pytest.raises(ValueError, match=r"2 labels .* 2 solutions"):
        StepsDataset.from_arrays(built.arrays() | {"labels": np.zeros(2)}, built.meta())
