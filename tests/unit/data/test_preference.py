import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import marked
from refusals import refused

from openrlhf.data.cache import cached
from openrlhf.data.files import REMEDY
from openrlhf.data.preference import SAME_ANSWERS, PairDataset, build_pairs
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.errors import ErrorCode
from openrlhf.rows import PairRow
from openrlhf.tasks.tiny_model import tiny_tokenizer

OPTIONS = {
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "apply_chat_template": True,
    "input_template": None,
    "max_len": 64,
    "score_last_token": False,
}
PLAIN = {"apply_chat_template": False, "input_template": "Q{} A"}
ROW = {"prompt": "1+2", "chosen": "33", "rejected": "4"}
TOKENIZER = tiny_tokenizer()
DIGITS = st.text("12", max_size=8)


def build(rows, tokenizer=TOKENIZER, **changes):
    return build_pairs(Rows.of(rows, "rows.json"), tokenizer, **(OPTIONS | changes))


def both(pair, tokenizer=TOKENIZER):
    return marked(pair.chosen, tokenizer), marked(pair.rejected, tokenizer)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_golden_tokens_of_an_input_template():
    (pair,) = build([ROW], **PLAIN)
    assert both(pair) == ("Q1+2 A⟦33<|end|>⟧", "Q1+2 A⟦4<|end|>⟧")
    assert pair.chosen.token_ids.tolist() == ids("Q1+2 A") + ids("33") + [TOKENIZER.eos_token_id]
    assert pair.rejected.action_mask.tolist() == [False] * 6 + [True] * 2
    assert pair.chosen.token_ids.dtype == torch.int64
    assert pair.chosen.action_mask.dtype == torch.bool
    assert (pair.margin, pair.ref_log_probs) == (0, None)


def test_golden_tokens_of_a_chat_template():
    (pair,) = build([ROW])
    assert both(pair) == (
        "<|user|>1+2<|end|><|assistant|>⟦33<|end|>⟧",
        "<|user|>1+2<|end|><|assistant|>⟦4<|end|>⟧",
    )


def test_texts_messages_and_whole_conversations_say_the_same():
    expected = both(build([ROW])[0])
    for row, prompt_key in (
        ({"prompt": [user("1+2")], "chosen": "33", "rejected": "4"}, "prompt"),
        ({"prompt": "1+2", "chosen": [assistant("33")], "rejected": [assistant("4")]}, "prompt"),
        ({"prompt": [user("1+2")], "chosen": [assistant("33")], "rejected": [assistant("4")]}, "prompt"),
        ({"chosen": [user("1+2"), assistant("33")], "rejected": [user("1+2"), assistant("4")]}, None),
    ):
        (pair,) = build([row], prompt_key=prompt_key)
        assert both(pair) == expected


def test_only_the_last_answer_of_a_conversation_is_an_answer():
    start = [{"role": "system", "content": "s"}, user("1"), assistant("2"), user("3")]
    row = {"chosen": [*start, assistant("4")], "rejected": [*start, assistant("5")]}
    prompt = "<|system|>s<|end|><|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
    (pair,) = build([row], prompt_key=None)
    assert both(pair) == (f"{prompt}⟦4<|end|>⟧", f"{prompt}⟦5<|end|>⟧")


def test_answers_without_a_prompt_stand_alone():
    (pair,) = build([ROW], **PLAIN, prompt_key=None)
    assert both(pair) == ("3⟦3<|end|>⟧", "4⟦<|end|>⟧")


def test_for_a_reward_model_only_the_last_token_counts_and_it_is_the_end():
    for options in (PLAIN, {}):
        (pair,) = build([ROW], **options, score_last_token=True)
        (learned,) = build([ROW], **options)
        assert pair.chosen.token_ids.tolist() == learned.chosen.token_ids.tolist()
        for sample in (pair.chosen, pair.rejected):
            assert sample.token_ids[-1] == TOKENIZER.eos_token_id
            assert sample.action_mask.tolist() == [False] * (sample.length - 1) + [True]
    (pair,) = build([ROW], score_last_token=True)
    assert marked(pair.chosen, TOKENIZER) == "<|user|>1+2<|end|><|assistant|>33⟦<|end|>⟧"


def test_an_end_that_is_there_is_not_doubled():
    row = {"prompt": "1+2", "chosen": "33<|end|>", "rejected": "4\n\n"}
    for score_last_token in (False, True):
        (pair,) = build([row], **PLAIN, score_last_token=score_last_token)
        (expected,) = build([ROW], **PLAIN, score_last_token=score_last_token)
        assert both(pair) == both(expected)


def test_a_long_answer_is_cut_and_only_a_scored_one_keeps_its_end():
    row = {"prompt": "12", "chosen": "34567", "rejected": "8"}
    learned = build([row], **PLAIN | {"input_template": None}, max_len=6)
    assert both(learned[0]) == ("12⟦3456⟧", "12⟦8<|end|>⟧")
    assert learned.truncated == 1
    scored = build([row], **PLAIN | {"input_template": None}, max_len=6, score_last_token=True)
    assert both(scored[0]) == ("12345⟦<|end|>⟧", "128⟦<|end|>⟧")
    assert scored.truncated == 1
    whole = build([row], **PLAIN | {"input_template": None}, max_len=8)
    assert both(whole[0]) == ("12⟦34567<|end|>⟧", "12⟦8<|end|>⟧")
    assert whole.truncated == 0


@pytest.mark.parametrize("score_last_token", [False, True])
def test_pairs_that_teach_nothing_are_dropped_and_counted(score_last_token):
    rows = [
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {"prompt": "1", "chosen": "2", "rejected": "2\n"},
        {"prompt": "1", "chosen": "234567", "rejected": "234568"},
        {"prompt": "1", "chosen": "2", "rejected": ""},
        {"prompt": "1", "chosen": " \n", "rejected": "2"},
        {"prompt": "1234", "chosen": "2", "rejected": "3"},
    ]
    options = {"apply_chat_template": False, "max_len": 6, "score_last_token": score_last_token}
    dataset = build(rows, **options)
    assert len(dataset) == 1
    assert dataset.skipped == {
        "both answers are the same": 1,
        "both answers are the same up to max_len": 1,
        "nothing to learn (empty prompt or answer)": 2,
        "prompt of max_len - 2 tokens or more": 1,
    }
    assert dataset.truncated == 0
    assert dataset.needed_len == 8
    whole = build(rows, **options | {"max_len": 8})
    assert (len(whole), whole.truncated, whole.needed_len) == (3, 0, 0)
    with refused(ErrorCode.NO_ROWS, value="rows.json") as told:
        build(rows[1:2], **options)
    assert told.value.text.startswith(f"no pair is left of 1 row: 1 × {SAME_ANSWERS}.")


@pytest.mark.processes
@pytest.mark.parametrize("score_last_token", [False, True])
@settings(max_examples=60, deadline=None)
@given(prompt=DIGITS, one=DIGITS.filter(bool), other=DIGITS.filter(bool))
def test_the_length_that_is_named_is_the_smallest_that_keeps_a_pair_whole(
    score_last_token, prompt, one, other
):
    row = {"prompt": prompt, "chosen": one, "rejected": other}
    options = {**PLAIN, "input_template": None, "score_last_token": score_last_token}
    short = {"prompt": "1", "chosen": "2", "rejected": "3"}
    built = {n: build([short, row], **options, max_len=n) for n in range(4, 24)}
    kept = [n for n, dataset in built.items() if len(dataset) == 2 and not dataset.truncated]
    assert built[4].needed_len == (kept[0] if kept and kept[0] > 4 else 0)


def test_an_empty_answer_in_a_chat_teaches_nothing():
    for score_last_token in (False, True):
        dataset = build([ROW, ROW | {"rejected": ""}], score_last_token=score_last_token)
        assert dataset.skipped == {"nothing to learn (empty prompt or answer)": 1}


@settings(max_examples=50, deadline=None)
@given(prompt=st.text(min_size=1, max_size=8), texts=st.lists(st.text(max_size=8), min_size=2, max_size=2))
def test_both_sides_are_what_sft_makes_of_them(prompt, texts):
    """Learned sides have the tokens and marks of SFT; scored ones the same tokens, and one mark."""
    chosen, rejected = (text.rstrip("\n") + end for text, end in zip(texts, "ab", strict=True))
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]
    for options in ({"apply_chat_template": True, "input_template": None}, PLAIN):
        (learned,) = build(rows, **options)
        (scored,) = build(rows, **options, score_last_token=True)
        for column in ("chosen", "rejected"):
            (sample,) = build_sft_samples(
                Rows.of(rows),
                TOKENIZER,
                input_key="prompt",
                output_key=column,
                multiturn=False,
                pretrain=False,
                max_len=OPTIONS["max_len"],
                **options,
            )
            side = getattr(learned, column)
            assert side.token_ids.tolist() == sample.token_ids.tolist()
            assert side.action_mask.tolist() == sample.action_mask.tolist()
            assert getattr(scored, column).token_ids.tolist() == sample.token_ids.tolist()
            assert getattr(scored, column).num_actions == 1
        start = learned.chosen.action_mask.tolist().index(True)
        assert learned.rejected.action_mask.tolist().index(True) == start
        assert torch.equal(learned.chosen.token_ids[:start], learned.rejected.token_ids[:start])


@settings(max_examples=50, deadline=None)
@given(max_len=st.integers(4, 30), answers=st.lists(st.text("123", min_size=1, max_size=25), min_size=2))
def test_a_scored_side_ends_and_a_cut_one_is_full(max_len, answers):
    rows = [{"prompt": "0", "chosen": answer, "rejected": "9" + answer} for answer in answers]
    dataset = build(rows, apply_chat_template=False, max_len=max_len, score_last_token=True)
    for row, pair in zip(rows, dataset, strict=True):
        for column, sample in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert sample.length == min(max_len, len(row[column]) + 2)
            assert sample.token_ids[-1] == TOKENIZER.eos_token_id
            assert sample.token_ids[:-1].tolist() == ids("0" + row[column])[: sample.length - 1]
            assert sample.action_mask.nonzero().tolist() == [[sample.length - 1]]


def test_margins_are_read_from_their_column():
    rows = [ROW | {"margin": 2}, ROW | {"margin": "-0.25"}]  # as CSV has it
    dataset = build(rows, margin_key="margin")
    assert [pair.margin for pair in dataset] == [2.0, -0.25]
    assert PairRow.of(list(dataset)).margins.tolist() == [2.0, -0.25]


CHOSEN_TALK = [user("1"), assistant("2"), user("3"), assistant("4")]
BAD = {
    "no margin": (ROW, {"margin_key": "margin"}, "column 'margin' is missing"),
    "margin in words": (ROW | {"margin": "half"}, {"margin_key": "margin"}, "is 'half' (text)"),
    "true as margin": (ROW | {"margin": True}, {"margin_key": "margin"}, "is True (true or false)"),
    "no end of the margin": (ROW | {"margin": float("inf")}, {"margin_key": "margin"}, "is inf"),
    "null": (ROW | {"rejected": None}, {}, "column 'rejected' is null"),
    "messages in text mode": (ROW | {"prompt": [user("1")]}, PLAIN, "'prompt' is a list"),
    "an odd message": (ROW | {"chosen": ["hi"]}, {}, "'chosen': message 1"),
    "an answer of the user": (ROW | {"rejected": [user("x")]}, {}, "role 'user'"),
    "the prompt twice": (ROW | {"chosen": [user("1+2"), assistant("33")]}, {}, "'chosen' already begins"),
    "text for a conversation": (
        {"chosen": "a", "rejected": "b"},
        {"prompt_key": None},
        "without --data.prompt_key",
    ),
    "other prompts": (
        {"chosen": CHOSEN_TALK, "rejected": [user("1"), assistant("2"), user("5"), assistant("6")]},
        {"prompt_key": None},
        "message 3 of 'chosen' and 'rejected'",
    ),
    "a longer prompt": (
        {"chosen": CHOSEN_TALK, "rejected": [user("1"), assistant("7")]},
        {"prompt_key": None},
        "message 2 of 'chosen' and 'rejected'",
    ),
    "no answer at the end": (
        {
            "chosen": [user("1"), assistant("2"), user("3")],
            "rejected": [user("1"), assistant("2"), user("4")],
        },
        {"prompt_key": None},
        "role 'user'",
    ),
}


@pytest.mark.parametrize("score_last_token", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(case, score_last_token):
    row, changes, reason = BAD[case]
    changes = changes | {"score_last_token": score_last_token}
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1) as told:
        build([row], **changes)
    assert reason in told.value.text and REMEDY in told.value.text
    assert told.value.text.count("\n") <= 2
    good = ROW | {"margin": 1.0}
    if changes.get("prompt_key", "prompt") is None:
        good = {"chosen": [user("1"), assistant("2")], "rejected": [user("1"), assistant("3")]}
    dataset = build([row, good], **changes, bad_rows="skip")
    assert len(dataset) == 1
    assert dataset.skipped == {"bad row": 1}


@pytest.mark.parametrize("score_last_token", [False, True])
@pytest.mark.parametrize("prompt", ["1+2 ", [user("1 + 2")], [user("0"), user("1+2\n")]])
def test_answers_that_begin_with_the_prompt_are_refused(prompt, score_last_token):
    row = {"prompt": prompt, "chosen": [user("1+2"), assistant("33")], "rejected": "4"}
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1) as told:
        build([row], score_last_token=score_last_token)
    assert "'chosen' already begins" in told.value.text and "--data.prompt_key" in told.value.text
    system = {"role": "system", "content": "Count."}
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1, told="'chosen' already begins"):
        row["chosen"] = [system, user("1+2"), assistant("33")]
        build([row], score_last_token=score_last_token)
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1) as told:
        build([row | {"chosen": [system, assistant("33")]}], score_last_token=score_last_token)
    assert "'chosen' has a system message behind those of 'prompt'" in told.value.text
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1) as told:
        build([ROW | {"prompt": [user("1+2"), assistant("3")]}], score_last_token=score_last_token)
    assert "'prompt' and 'chosen' have an answer each" in told.value.text


@pytest.mark.parametrize("score_last_token", [False, True])
def test_an_answer_that_ends_itself_is_refused(score_last_token):
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1):
        build([ROW | {"rejected": "4<|end|>"}], score_last_token=score_last_token)


@pytest.mark.parametrize("header", ["<|assistant|><think>", "<|Assistant|>"])
def test_a_template_that_shows_another_header_than_it_asks_for_can_only_be_scored(header):
    """Such a template opens a thought, for example, which the finished conversation does not show."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("%}<|assistant|>", "%}" + header)
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
        build([ROW], tokenizer)
    assert "message 2 of 2" in told.value.text and "--data.tokenizer_chat_template" in told.value.text
    (pair,) = build([ROW], tokenizer, score_last_token=True)
    assert marked(pair.chosen, tokenizer) == "<|user|>1+2<|end|><|assistant|>33⟦<|end|>⟧"


def test_a_tokenizer_whose_template_has_another_end_gets_the_end_of_sequence_too():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    (pair,) = build([ROW], tokenizer)
    assert marked(pair.chosen, tokenizer).endswith("⟦33<|end|><|endoftext|>⟧")
    (pair,) = build([ROW], tokenizer, score_last_token=True)
    assert marked(pair.chosen, tokenizer).endswith("33<|end|>⟦<|endoftext|>⟧")


@pytest.mark.parametrize("chat", [True, False])
def test_a_score_needs_an_end_and_an_answer_does_not(chat):
    tokenizer, options = tiny_tokenizer(), {} if chat else PLAIN
    tokenizer.eos_token = None
    with refused(ErrorCode.INVALID_MODEL, value=tokenizer.name_or_path):
        build([ROW], tokenizer, score_last_token=True, **options)
    (pair,) = build([ROW], tokenizer, **options)
    assert marked(pair.chosen, tokenizer).endswith("⟦33<|end|>⟧" if chat else "⟦33⟧")


def test_lengths_are_the_tokens_of_both():
    dataset = build([ROW, ROW | {"chosen": "3456"}], **PLAIN)
    assert list(dataset.lengths) == [6 + 3 + 6 + 2, 6 + 5 + 6 + 2]
    assert [pair.chosen.length + pair.rejected.length for pair in dataset] == list(dataset.lengths)


def test_known_reference_log_probs_come_with_the_pairs():
    dataset = build([ROW, ROW | {"chosen": "3456"}])
    known = dataset.with_reference(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert dataset[0].ref_log_probs is None
    assert [pair.ref_log_probs.tolist() for pair in known] == [[1.0, 2.0], [3.0, 4.0]]
    assert PairRow.of(list(known)).ref_log_probs.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert both(known[1]) == both(dataset[1])
    with pytest.raises(ValueError, match="4 samples for 3 ref_log_probs"):
        dataset.with_reference(np.zeros((3, 2)))


def test_a_kept_dataset_reads_the_same(tmp_path):
    rows = [ROW | {"margin": 0.5}, ROW | {"prompt": "1234567890", "margin": 1.0}, {"prompt": "x"}]

    def make():
        options = {"margin_key": "margin", "max_len": 10, "bad_rows": "skip"}
        return build(rows, apply_chat_template=False, **options).with_reference(np.array([[1.0, 2.0]]))

    def fail():
        raise AssertionError("built again")

    built = make()
    cached(PairDataset, {"test": 1}, make, cache_dir=str(tmp_path))
    kept = cached(PairDataset, {"test": 1}, fail, cache_dir=str(tmp_path))
    assert isinstance(kept.margins, np.memmap)
    assert kept.arrays().keys() == built.arrays().keys()
    assert (kept.skipped, kept.truncated) == (built.skipped, built.truncated)
    assert list(kept.lengths) == list(built.lengths)
    assert both(kept[0]) == both(built[0])
    assert (kept[0].margin, kept[0].ref_log_probs.tolist()) == (0.5, [1.0, 2.0])
    with pytest.raises(ValueError, match="2 samples for 2 margins"):
        PairDataset.from_arrays(built.arrays() | {"margins": np.zeros(2)}, built.meta())
