import pytest
import torch
from refusals import refused

from openrlhf.data.inference import build_answers, build_questions, fingerprint, iteration, with_suffix
from openrlhf.data.preference import build_pairs
from openrlhf.data.sources import Rows
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tools.serve.interactive_chat import Conversation

TOKENIZER = tiny_tokenizer()
PLAIN = {"input_key": "input", "apply_chat_template": False, "input_template": None}
CHAT = PLAIN | {"apply_chat_template": True}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def rows(*values) -> Rows:
    return Rows.of([{"input": value} for value in values], "train.jsonl")


def questions(rows: Rows, numbers=None, **changes):
    options = PLAIN | {"suffix": None, "max_len": 100} | changes
    return build_questions(rows, range(len(rows)) if numbers is None else numbers, TOKENIZER, **options)


def test_iterations_cut_the_rows_and_go_around():
    assert iteration(5, None, 3) == range(5)
    assert [n % 5 for n in iteration(5, 0, 3)] == [0, 1, 2]
    assert [n % 5 for n in iteration(5, 1, 3)] == [3, 4, 0]
    assert [n % 2 for n in iteration(2, 0, 3)] == [0, 1, 0]


def test_a_number_beyond_the_rows_is_a_row_again_with_an_id_of_its_own():
    asked = questions(rows("a", "b", "c"), [2, 3, 4])
    assert [(q.prompt_id, q.input) for q in asked] == [(2, "c"), (3, "a"), (4, "b")]


def test_the_input_stays_raw_and_the_tokens_have_the_template():
    (asked,) = questions(rows("1 + 1?"), input_template="Q: {}\nA:")
    assert asked.input == "1 + 1?" and asked.token_ids == ids("Q: 1 + 1?\nA:")
    (asked,) = questions(rows("1 + 1?"), apply_chat_template=True)
    assert asked.input == "1 + 1?" and asked.token_ids == ids("<|user|>1 + 1?<|end|><|assistant|>")


def test_a_suffix_goes_before_the_template_and_not_into_the_input():
    (asked,) = questions(rows("Hi"), suffix=" <rm>: 5.00 ", input_template="Q: {}\nA:")
    assert asked.input == "Hi" and asked.token_ids == ids("Q: Hi <rm>: 5.00 \nA:")


def test_a_suffix_looks_as_the_reward_template_writes_it():
    template = "{input} <rm_score>: {reward} "
    assert with_suffix("Hi", "<rm_score>: 5.00") == template.format(input="Hi", reward="5.00")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]
    assert with_suffix(messages, "good") == [messages[0], {"role": "user", "content": "Hi good "}]


def test_prompts_that_are_too_long_are_bad_rows():
    some = rows("a b", "a b c d e f", "c")
    with refused(ErrorCode.TOO_LONG, value="train.jsonl", row=2, told="--data.prompt_max_len"):
        questions(some, max_len=3)
    kept = questions(some, max_len=3, bad_rows="skip")
    assert [q.prompt_id for q in kept] == [0, 2]
    with refused(ErrorCode.NO_ROWS, value="train.jsonl"):
        questions(some, max_len=0, bad_rows="skip")


def test_a_token_without_an_embedding_makes_a_bad_row():
    (last,) = ids("c")
    some = rows("a b", "a b c d", "b")
    with refused(ErrorCode.INVALID_ROW, value="train.jsonl", row=2, told="the token 'c'"):
        questions(some, missing={last: "c"})
    assert [q.prompt_id for q in questions(some, missing={last: "c"}, bad_rows="skip")] == [0, 2]
    pairs = ("a", "b"), ("b", "c"), ("c", "b"), ("b", "a")
    kept = answers(*pairs, missing={last: "c"}, bad_rows="skip")
    assert [(answer.prompt_id, answer.output) for answer in kept] == [(0, "b"), (3, "a")]


def answers(*pairs, **changes):
    some = Rows.of([{"input": i, "output": o} for i, o in pairs])
    return build_answers(some, TOKENIZER, **(PLAIN | {"output_key": "output", "max_len": 100} | changes))


def test_a_score_is_read_off_the_last_token_which_ends_the_sequence():
    (plain,) = answers(("1 + 1?", " 2\n"))
    assert plain.sample.token_ids.tolist() == [*ids("1 + 1? 2"), TOKENIZER.eos_token_id]
    (chat,) = answers(("1 + 1?", "2"), apply_chat_template=True)
    assert chat.sample.token_ids.tolist() == ids("<|user|>1 + 1?<|end|><|assistant|>2<|end|>")
    for answer in (plain, chat):
        assert answer.sample.action_mask.nonzero().tolist() == [[answer.sample.length - 1]]


def test_a_truncated_answer_has_no_end_as_in_rl():
    some = Rows.of([{"input": "1 + 1?", "output": "23", "finish_reason": "length"}])
    options = PLAIN | {"output_key": "output", "max_len": 100}
    (plain,) = build_answers(some, TOKENIZER, **options)
    assert plain.sample.token_ids.tolist() == ids("1 + 1?23")
    (chat,) = build_answers(some, TOKENIZER, **options | {"apply_chat_template": True})
    assert chat.sample.token_ids.tolist() == ids("<|user|>1 + 1?<|end|><|assistant|>23")
    (short,) = build_answers(some, TOKENIZER, **options | {"max_len": 5})
    assert short.sample.token_ids.tolist() == ids("1 + 1?23")[:5]
    for answer in (plain, chat, short):
        assert answer.sample.action_mask.nonzero().tolist() == [[answer.sample.length - 1]]


def test_an_empty_answer_is_scored_too():
    (plain,) = answers(("1 + 1?", ""))
    assert plain.sample.token_ids.tolist() == [*ids("1 + 1?"), TOKENIZER.eos_token_id]


def test_a_long_answer_is_cut_before_its_end():
    (cut,) = answers(("1", "23456789"), max_len=4)
    assert cut.sample.token_ids.tolist() == [*ids("123"), TOKENIZER.eos_token_id]


@pytest.mark.parametrize("chat", [True, False])
def test_answers_are_read_as_the_training_of_reward_models_reads_them(chat):
    texts = ("1 + 1?", "2, for sure", "three\n")
    options = {"apply_chat_template": chat, "input_template": None if chat else "Q: {}\nA:", "max_len": 20}
    pairs = build_pairs(
        Rows.of([dict(zip(("input", "good", "bad"), texts, strict=True))]),
        TOKENIZER,
        prompt_key="input",
        chosen_key="good",
        rejected_key="bad",
        score_last_token=True,
        **options,
    )
    for sample, output in ((pairs[0].chosen, texts[1]), (pairs[0].rejected, texts[2])):
        (answer,) = answers((texts[0], output), **options)
        assert answer.sample.token_ids.tolist() == sample.token_ids.tolist()
        assert answer.sample.action_mask.tolist() == sample.action_mask.tolist()


def test_a_prompt_that_ends_with_the_assistant_is_continued_and_takes_no_other_answer():
    talk = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    (asked,) = questions(rows(talk), input_template=None, apply_chat_template=True)
    assert asked.input == talk and asked.token_ids == ids("<|user|>2+2<|end|><|assistant|>4")
    with refused(ErrorCode.INVALID_ROW, told="'input' and 'output' have an answer each"):
        answers((talk, "5"), apply_chat_template=True)


def test_a_fingerprint_changes_with_what_is_read():
    same = [fingerprint(questions(rows("a", "b"))) for _ in range(2)]
    others = [
        fingerprint(questions(rows("a", "c"))),
        fingerprint(questions(rows("a", "b"), [1, 2])),
        fingerprint(questions(rows("a", "b"), input_template="{} ")),
        fingerprint(answers(("a", "b"))),
    ]
    assert same[0] == same[1] and len({same[0], *others}) == 5


def test_a_plain_conversation_grows():
    talk = Conversation(TOKENIZER, apply_chat_template=False, input_template="User: {}\nAssistant: ")
    assert talk.prompt("Hi") == "User: Hi\nAssistant: "
    talk.add("Hi", "Hello.")
    assert talk.prompt("Bye") == "User: Hi\nAssistant: Hello.\nUser: Bye\nAssistant: "
    talk.clear()
    assert talk.prompt("Hi") == "User: Hi\nAssistant: " and talk.num_turns == 0


def test_a_conversation_with_a_chat_template():
    talk = Conversation(
        TOKENIZER, apply_chat_template=True, input_template=None, start="Be kind.", suffix="<good>"
    )
    talk.add("Hi", "Hello.")
    assert talk.prompt("Bye") == (
        "<|system|>Be kind.<|end|><|user|>Hi <good> <|end|><|assistant|>Hello.<|end|>"
        "<|user|>Bye <good> <|end|><|assistant|>"
    )


def test_a_plain_conversation_may_start_with_a_text():
    talk = Conversation(TOKENIZER, apply_chat_template=False, input_template=None, start="Count.")
    assert talk.prompt("1, 2,") == "Count.\n1, 2,"


def test_scores_are_positions_of_samples():
    (answer,) = answers(("a", "b"))
    assert answer.key == (0, 0) and answer.sample.token_ids.dtype == torch.int64


def test_answers_of_a_tokenizer_without_an_end_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    options = PLAIN | {"output_key": "output", "max_len": 100}
    with refused(ErrorCode.INVALID_MODEL):
        build_answers(Rows.of([{"input": "1", "output": "2"}]), tokenizer, **options)
