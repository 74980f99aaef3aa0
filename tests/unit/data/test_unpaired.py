import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import marked
from refusals import refused

from openrlhf.data.cache import cached
from openrlhf.data.files import REMEDY
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.data.unpaired import UnpairedDataset, build_unpaired, other_prompts
from openrlhf.errors import ErrorCode
from openrlhf.rows import UnpairedRow
from openrlhf.tasks.tiny_model import tiny_tokenizer

OPTIONS = {
    "input_key": "input",
    "output_key": "output",
    "apply_chat_template": True,
    "input_template": None,
    "max_len": 64,
}
PLAIN = {"apply_chat_template": False, "input_template": "Q{} A"}
ROWS = [{"input": "12", "output": "33", "label": True}, {"input": "4", "output": "567", "label": False}]
TOKENIZER = tiny_tokenizer()


def build(rows, *, label_key="label", seed=1, bad_rows="error", **changes):
    options = OPTIONS | changes
    return build_unpaired(
        Rows.of(rows, "rows.json"), TOKENIZER, label_key=label_key, seed=seed, bad_rows=bad_rows, **options
    )


def texts(example):
    return marked(example.sample, TOKENIZER), marked(example.mismatched, TOKENIZER)


def test_golden_tokens_of_an_input_template():
    good, bad = build(ROWS, **PLAIN)
    assert texts(good) == ("Q12 A⟦33<|end|>⟧", "Q12 A⟦567<|end|>⟧")
    assert texts(bad) == ("Q4 A⟦567<|end|>⟧", "Q4 A⟦33<|end|>⟧")
    assert (good.desirable, bad.desirable) == (True, False)
    assert good.mismatched.token_ids.dtype == torch.int64
    assert good.mismatched.action_mask.dtype == torch.bool
    assert good.ref_log_probs is None


def test_golden_tokens_of_a_chat_template():
    as_messages = [
        {"input": [{"role": "user", "content": row["input"]}], "output": row["output"], "label": row["label"]}
        for row in ROWS
    ]
    as_conversations = [
        {"input": [*row["input"], {"role": "assistant", "content": row["output"]}], "label": row["label"]}
        for row in as_messages
    ]
    for rows, output_key in ((ROWS, "output"), (as_messages, "output"), (as_conversations, None)):
        good, bad = build(rows, output_key=output_key)
        assert texts(good) == (
            "<|user|>12<|end|><|assistant|>⟦33<|end|>⟧",
            "<|user|>12<|end|><|assistant|>⟦567<|end|>⟧",
        )
        assert texts(bad)[1] == "<|user|>4<|end|><|assistant|>⟦33<|end|>⟧"


def test_a_mismatched_answer_is_cut_behind_its_prompt():
    rows = [{"input": "123", "output": "4", "label": 1}, {"input": "5", "output": "6789012", "label": 0}]
    dataset = build(rows, apply_chat_template=False, max_len=7)
    assert texts(dataset[0]) == ("123⟦4<|end|>⟧", "123⟦6789⟧")
    assert texts(dataset[1]) == ("5⟦678901⟧", "5⟦4<|end|>⟧")
    assert dataset.truncated == 1
    assert list(dataset.lengths) == [5 + 7, 7 + 3]
    again = build(rows, apply_chat_template=False, max_len=12)
    assert texts(again[0])[1] == "123⟦6789012<|end|>⟧"
    assert again.truncated == 0


PROMPTS = st.sampled_from(["a", "bc", "d e", "1"])
ROW_LISTS = st.lists(st.tuples(PROMPTS, st.text(max_size=9)), min_size=2, max_size=9)


@settings(max_examples=40, deadline=None)
@given(pairs=ROW_LISTS, seed=st.integers(0, 5), max_len=st.integers(9, 20))
def test_a_mismatched_sample_is_a_prompt_with_the_answer_to_another(pairs, seed, max_len):
    rows = [{"input": prompt, "output": answer + ".", "label": True} for prompt, answer in pairs]
    options = {**PLAIN, "max_len": max_len}
    if len({row["input"] for row in rows}) == 1:
        with refused(ErrorCode.INVALID_ROW, flag="--data.input_key"):
            build(rows, seed=seed, **options)
        return
    dataset = build(rows, seed=seed, **options)
    wholes = list(_sft(rows, **{**options, "max_len": 1000}))
    samples = list(_sft(rows, **options))
    for i, (example, whole, sample) in enumerate(zip(dataset, wholes, samples, strict=True)):
        assert example.sample.token_ids.tolist() == sample.token_ids.tolist()
        assert example.sample.action_mask.tolist() == sample.action_mask.tolist()
        prompt = whole.token_ids[~whole.action_mask].tolist()
        other_answers = [
            other.token_ids[other.action_mask].tolist()
            for j, other in enumerate(wholes)
            if rows[j]["input"] != rows[i]["input"]
        ]
        found = example.mismatched.token_ids.tolist()
        assert found in [(prompt + answer)[:max_len] for answer in other_answers]
        mask = example.mismatched.action_mask.tolist()
        assert mask == [False] * len(prompt) + [True] * (len(found) - len(prompt))


def _sft(rows, **options):
    return build_sft_samples(Rows.of(rows), TOKENIZER, **(OPTIONS | options), multiturn=False, pretrain=False)


@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(st.integers(0, 6), min_size=2, max_size=30), seed=st.integers(0, 9))
def test_the_other_row_has_another_prompt_and_each_is_taken_once_where_that_can_be(prompts, seed):
    _, numbers = np.unique(prompts, return_inverse=True)
    if numbers.max() == 0:
        return
    others = other_prompts(numbers, seed)
    assert (numbers[others] != numbers).all()
    if np.bincount(numbers).max() * 2 <= len(numbers):
        assert sorted(others.tolist()) == list(range(len(numbers)))


def test_the_other_row_depends_on_the_seed_and_on_nothing_else():
    prompts = np.arange(50)
    orders = {seed: other_prompts(prompts, seed).tolist() for seed in range(5)}
    assert len({tuple(order) for order in orders.values()}) == 5
    torch.manual_seed(7)
    np.random.seed(7)
    assert other_prompts(prompts, 3).tolist() == orders[3]


def test_every_other_prompt_is_as_likely():
    """With three prompts, each row meets both others about equally often: 1000 ± 5 deviations of 22."""
    counts = np.zeros((3, 3), dtype=int)
    for seed in range(2000):
        counts[np.arange(3), other_prompts(np.arange(3), seed)] += 1
    assert (counts.diagonal() == 0).all()
    off = counts[~np.eye(3, dtype=bool)]
    assert abs(off - 1000).max() < 112


def test_a_batch_of_one_has_a_mismatched_answer():
    dataset = build(ROWS)
    row = UnpairedRow.of([dataset[0]])
    assert row.num_sequences == 1
    assert row.mismatched.token_ids.tolist() != row.row.token_ids.tolist()


def test_rows_with_one_prompt_are_refused():
    rows = [{"input": "1", "output": str(i), "label": i % 2} for i in range(4)]
    for some in (rows, rows[:1]):
        with refused(ErrorCode.INVALID_ROW, flag="--data.input_key", value="input") as told:
            build(some)
        assert f"all {len(some)} rows" in told.value.text


def test_nothing_left_is_an_error():
    with refused(ErrorCode.NO_ROWS, value="rows.json") as told:
        build(ROWS, max_len=3)
    assert told.value.text.startswith("no answer is left of 2 rows: 2 × ")


@pytest.mark.parametrize("label", [True, False, 1, 0, 1.0, 0.0, "True", "false", "1", "0"])
def test_labels_are_true_false_one_and_zero(label):
    """Values of CSV are texts."""
    example = build([{"input": "1", "output": "2", "label": label}, ROWS[0]])[0]
    assert example.desirable is (label in (True, "True", "1"))


BAD = {
    "text": ("good", "'label' is 'good' (text)"),
    "two": (2, "is 2 (a number)"),
    "half": (0.5, "is 0.5 (a number)"),
    "minus one": (-1, "is -1 (a number)"),
    "a list": ([1], "is [1] (a list)"),
    "null": (None, "'label' is null"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_label_is_named_or_skipped(case):
    label, reason = BAD[case]
    rows = [*ROWS, {"input": "7", "output": "8", "label": label}]
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=3, told=(reason, REMEDY)):
        build(rows)
    dataset = build(rows, bad_rows="skip")
    assert len(dataset) == 2
    assert dataset.skipped == {"bad row": 1}


def test_a_bad_answer_is_named():
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=3, told="'output' is missing"):
        build([*ROWS, {"input": "7", "label": True}])


def test_rows_that_teach_nothing_are_dropped_and_lend_no_answer():
    rows = [
        *ROWS,
        {"input": "7", "output": "", "label": True},
        {"input": "12345678", "output": "9", "label": True},
    ]
    dataset = build(rows, apply_chat_template=False, max_len=8)
    assert dataset.skipped == {
        "nothing to learn (empty prompt or answer)": 1,
        "prompt of max_len - 2 tokens or more": 1,
    }
    assert dataset.needed_len == 11  # the prompt of 8 leaves room for three tokens, of which it has two
    assert {texts(example)[1] for example in dataset} == {"12⟦567<|end|>⟧", "4⟦33<|end|>⟧"}


def test_one_class_alone_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        build(ROWS)
    assert caplog.text == ""
    for label, word in ((True, "good"), (False, "bad")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dataset = build([row | {"label": label} for row in ROWS])
        assert len(dataset) == 2
        (message,) = caplog.messages
        assert message.startswith("--data.label_key label: ") and f"2 answers are {word}" in message


def test_known_reference_log_probs_come_with_the_answers():
    dataset = build(ROWS)
    known = dataset.with_reference(np.array([[1.0, 2.0], [3.0, 4.0]]))
    row = UnpairedRow.of(list(known))
    assert row.ref_log_probs.tolist() == [1.0, 3.0]
    assert row.ref_mismatched.tolist() == [2.0, 4.0]
    assert UnpairedRow.of(list(dataset)).ref_log_probs is None


def test_a_kept_dataset_reads_the_same(tmp_path):
    def make():
        return build(ROWS)

    def fail():
        raise AssertionError("built again")

    built = make()
    cached(UnpairedDataset, {"test": 1}, make, cache_dir=str(tmp_path))
    kept = cached(UnpairedDataset, {"test": 1}, fail, cache_dir=str(tmp_path))
    assert isinstance(kept.desirable, np.memmap)
    assert [texts(example) for example in kept] == [texts(example) for example in built]
    assert [example.desirable for example in kept] == [True, False]
    with pytest.raises(ValueError, match="4 samples for 3 desirable"):
        UnpairedDataset.from_arrays(built.arrays() | {"desirable": np.ones(3, dtype=bool)}, built.meta())
