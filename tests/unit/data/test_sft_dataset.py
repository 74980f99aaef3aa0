import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import processors
from transformers import PreTrainedTokenizer

from openrlhf.data.encode import LONG_PROMPT, log_skipped
from openrlhf.data.files import REMEDY
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows, load_rows
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.tasks.tiny_model import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NO_SPECIAL_TOKENS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_THOUGHT_IN_THE_LAST_TURN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPTIONS = {
    "input_key": "input",
    "output_key": "output",
    "apply_chat_template": True,
    "input_template": None,
    "multiturn": False,
    "pretrain": False,
    "max_len": 256,
}
TALK = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "a2"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return chatml()


def tokenizer_with(template, special_tokens=()):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", *special_tokens], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def chatml():
    return tokenizer_with(CHATML)


def llama3():
    return tokenizer_with(LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])


def build(rows, tokenizer, **changes):
    return build_sft_samples(Rows.of(rows, "rows.json"), tokenizer, **(OPTIONS | changes))


def learned_texts(sample, tokenizer):
    """Returns the texts of the learned stretches, in order."""
    texts, stretch = [], []
    for token, learned in zip(
        [*sample.token_ids.tolist(), 0], [*sample.action_mask.tolist(), False], strict=True
    ):
        if learned:
            stretch.append(token)
        elif stretch:
            texts.append(tokenizer.decode(stretch))
            stretch = []
    return texts


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_rows_of_a_prompt_and_a_response_name_the_flag_and_the_columns(tokenizer):
    with refused(ErrorCode.MISSING_FLAG, flag="--data.output_key", told=("'input'", "output, source")):
        build([{"input": "1 + 1?", "output": "2", "source": "x"}], tokenizer, output_key=None)


def test_golden_tokens_of_an_input_template(tokenizer):
    changes = {"apply_chat_template": False, "input_template": "User: {}\nAssistant: "}
    (sample,) = build([{"input": "1+2", "output": "hi 3"}], tokenizer, **changes)
    tokens = [tokenizer.decode(token) for token in sample.token_ids.tolist()]
    assert "".join(tokens) == "User: 1+2\nAssistant: hi 3<|im_end|>"
    prompt = encode(tokenizer, "User: 1+2\nAssistant: ")
    assert sample.token_ids.tolist() == prompt + encode(tokenizer, "hi 3") + [tokenizer.eos_token_id]
    assert sample.action_mask.tolist() == [False] * len(prompt) + [True] * (
        len(sample.token_ids) - len(prompt)
    )
    assert sample.token_ids.dtype == torch.int64
    assert sample.action_mask.dtype == torch.bool


@pytest.mark.parametrize("breaks", ["", "\n", "\r\n", "\r\n\r\n"])
def test_line_breaks_behind_an_answer_are_not_learned(tokenizer, breaks):
    changes = {"apply_chat_template": False, "input_template": None}
    (sample,) = build([{"input": "1+2=", "output": f"3\r\n4{breaks}"}], tokenizer, **changes)
    assert learned_texts(sample, tokenizer) == ["3\r\n4<|im_end|>"]


def test_golden_tokens_of_a_chat_template(tokenizer):
    (sample,) = build([{"input": "1+2", "output": "hi 3"}], tokenizer)
    text = "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\nhi 3<|im_end|>"
    assert sample.token_ids.tolist() == encode(tokenizer, text)
    assert learned_texts(sample, tokenizer) == ["hi 3<|im_end|>"]


def test_an_end_that_is_there_is_not_doubled_and_nothing_is_overwritten(tokenizer):
    for output in ("hi 3", "hi 3<|im_end|>", "hi 3\n\n"):
        (sample,) = build([{"input": "x", "output": output}], tokenizer, apply_chat_template=False)
        assert learned_texts(sample, tokenizer) == ["hi 3<|im_end|>"]


@pytest.mark.parametrize("template", ["User: {}\nAssistant: ", "{}", "{} ", "Q {}\n\n", None])
@pytest.mark.parametrize("trim_offsets", [False, True])
@settings(max_examples=40, deadline=None)
@given(prompt=st.text(min_size=1, max_size=12), response=st.text(max_size=12))
@example(prompt="e", response="ats")  # one token takes the prompt's end, which is rare in random texts
def test_the_prompt_is_read_as_the_policy_reads_it(template, trim_offsets, prompt, response):
    """Tokens agree whatever merges at the border, and whether or not offsets leave out the space before a
    word."""
    tokenizer = (TRIMMED if trim_offsets else TINY)()
    before = prompt if template is None else template.format(prompt)
    response = response.rstrip("\n") + "."
    rows = [{"input": prompt, "output": response}]
    (sample,) = build(rows, tokenizer, apply_chat_template=False, input_template=template)
    prompt_ids = encode(tokenizer, before)
    assert sample.token_ids[: len(prompt_ids)].tolist() == prompt_ids
    assert sample.action_mask.tolist().index(True) == len(prompt_ids)
    assert sample.action_mask[len(prompt_ids) :].all()
    assert tokenizer.decode(sample.token_ids) == before + response + tokenizer.eos_token


def _cached(make):
    made = []

    def get():
        if not made:
            made.append(make())
        return made[0]

    return get


def _trimmed():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


TINY, TRIMMED = _cached(tiny_tokenizer), _cached(_trimmed)


def test_every_assistant_turn_is_learned_with_its_end(tokenizer):
    (sample,) = build([{"input": TALK}], tokenizer, output_key=None, multiturn=True)
    assert learned_texts(sample, tokenizer) == ["a1<|im_end|>", "a2<|im_end|>"]
    assert sample.token_ids.tolist() == encode(
        tokenizer, tokenizer.apply_chat_template(TALK, tokenize=False).rstrip("\n")
    )


def test_llama3_turns_end_with_their_own_token_and_the_text_with_eos():
    tokenizer = llama3()
    (sample,) = build([{"input": TALK}], tokenizer, output_key=None, multiturn=True)
    assert learned_texts(sample, tokenizer) == ["a1<|eot_id|>", "a2<|eot_id|><|im_end|>"]
    tokenizer.eos_token = "<|eot_id|>"
    (sample,) = build([{"input": TALK}], tokenizer, output_key=None, multiturn=True)
    assert learned_texts(sample, tokenizer) == ["a1<|eot_id|>", "a2<|eot_id|>"]


def test_a_template_without_special_tokens():
    tokenizer = tokenizer_with(NO_SPECIAL_TOKENS)
    (sample,) = build([{"input": TALK}], tokenizer, output_key=None, multiturn=True)
    assert learned_texts(sample, tokenizer) == ["a1", "a2<|im_end|>"]
    prompt = encode(tokenizer, "user: u1\n\nassistant: ")
    assert sample.token_ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("answer", ["yes", "yes \t", "yes\n \n"])
@pytest.mark.parametrize("end", ["", "\n", " \n", "<|im_end|>", "<|im_end|> \n", "<|eot_id|> \n"])
def test_the_end_of_an_answer_is_learned_whatever_blanks_stand_around_it(end, answer):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_with(template, ["<|eot_id|>"])
    (sample,) = build([{"input": "u", "output": answer}], tokenizer)
    written = answer + end.rstrip() if end.strip() else "yes"
    assert learned_texts(sample, tokenizer) == [written.removesuffix("<|im_end|>") + "<|im_end|>"]
    assert sample.token_ids[-1] == tokenizer.eos_token_id
    if not end.strip():
        assert build([{"input": "u", "output": " "}, {"input": "u", "output": "a"}], tokenizer).skipped == {
            "nothing to learn (empty prompt or answer)": 1
        }


def test_a_template_without_ends_of_turns_is_warned_of_once(caplog):
    tokenizer = tokenizer_with(NO_SPECIAL_TOKENS + "{# told once #}")
    (single,) = build([{"input": TALK}], tokenizer, output_key=None)
    assert learned_texts(single, tokenizer) == ["a2<|im_end|>"] and not caplog.records
    build([{"input": TALK}] * 2, tokenizer, output_key=None, multiturn=True)
    assert [record.message.count("--data.tokenizer_chat_template") for record in caplog.records] == [1]
    build([{"input": TALK}], chatml(), output_key=None, multiturn=True)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("make", [chatml, llama3])
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=10), min_size=2, max_size=6))
def test_learned_texts_are_the_assistant_messages(make, texts):
    tokenizer = MAKERS[make]()
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": f"<{text}>"} for i, text in enumerate(texts)]
    end = "<|eot_id|>" if make is llama3 else "<|im_end|>"
    wanted = [message["content"] + end for message in talk if message["role"] == "assistant"]
    (sample,) = build([{"input": talk}], tokenizer, output_key=None, multiturn=True)
    wanted[-1] += "<|im_end|>" if make is llama3 else ""
    assert learned_texts(sample, tokenizer) == wanted
    last = talk[: len(wanted) * 2]
    (single,) = build([{"input": last}], tokenizer, output_key=None)
    assert single.token_ids.tolist() == sample.token_ids.tolist()
    assert learned_texts(single, tokenizer) == wanted[-1:]


MAKERS = {chatml: _cached(chatml), llama3: _cached(llama3)}


@pytest.mark.parametrize(
    ("template", "contents"),
    [(FORGETS_THOUGHTS, ["<think>1</think>a1", "a2"]), (EMPTY_THOUGHT_IN_THE_LAST_TURN, ["a1", "a2"])],
)
def test_a_template_that_rewrites_history_is_refused_for_many_turns_only(template, contents):
    tokenizer = tokenizer_with(template)
    talk = [dict(message) for message in TALK]
    talk[1]["content"], talk[3]["content"] = contents
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
        build([{"input": talk}], tokenizer, output_key=None, multiturn=True)
    assert "message 2 of 4" in told.value.text and "--data.tokenizer_chat_template" in told.value.text
    (sample,) = build([{"input": talk}], tokenizer, output_key=None)
    assert learned_texts(sample, tokenizer)[0].endswith("a2<|im_end|>")


def test_a_turn_of_tool_calls_alone_is_learned():
    template = CHATML.replace("m['content']", "m['content'] or m['tool_calls'][0]['function'] | tojson")
    tokenizer = tokenizer_with(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    talk = [TALK[0], call, {"role": "tool", "content": "3"}, TALK[1]]
    (sample,) = build([{"input": talk}], tokenizer, output_key=None, multiturn=True)
    assert learned_texts(sample, tokenizer) == [
        '{"name": "add", "arguments": {"a": 1}}<|im_end|>',
        "a1<|im_end|>",
    ]


def test_output_column_and_messages(tokenizer):
    expected = learned = None
    for row in (
        {"input": "u", "output": "a"},
        {"input": [{"role": "user", "content": "u"}], "output": "a"},
        {"input": "u", "output": [{"role": "assistant", "content": "a"}]},
        {"input": [{"role": "user", "content": "u"}], "output": [{"role": "assistant", "content": "a"}]},
    ):
        (sample,) = build([row], tokenizer)
        expected = expected or sample.token_ids.tolist()
        learned = learned or sample.action_mask.tolist()
        assert sample.token_ids.tolist() == expected
        assert sample.action_mask.tolist() == learned
    (sample,) = build([{"input": TALK[:3], "output": "a2"}], tokenizer, multiturn=True)
    assert learned_texts(sample, tokenizer) == ["a1<|im_end|>", "a2<|im_end|>"]
    (sample,) = build([{"input": TALK[:3], "output": "a2"}], tokenizer)
    assert learned_texts(sample, tokenizer) == ["a2<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "multiturn", "said"),
    [(1, True, "no message is"), (1, False, "no message is"), (3, False, "the last message is not")],
)
def test_messages_without_an_answer_are_named(tokenizer, messages, multiturn, said):
    with pytest.raises(UsageError, match=f"{said} from the assistant"):
        build([{"input": TALK[:messages]}], tokenizer, output_key=None, multiturn=multiturn)


def test_what_follows_the_last_assistant_turn_is_cut(tokenizer):
    (sample,) = build([{"input": TALK[:3]}], tokenizer, output_key=None, multiturn=True)
    assert tokenizer.decode(sample.token_ids).endswith("a1<|im_end|>")


def test_pretraining_learns_every_token_but_the_first(tokenizer):
    (sample,) = build(
        [{"input": "1+2 {}\n"}], tokenizer, pretrain=True, output_key=None, input_template="User: {}"
    )
    assert sample.token_ids.tolist() == encode(tokenizer, "1+2 {}\n")
    assert sample.action_mask.tolist() == [False] + [True] * (len(sample.token_ids) - 1)


def test_a_long_sample_is_cut_and_gets_no_end(tokenizer):
    rows = [{"input": "u", "output": "1 2 3 4"}]
    (whole,) = build(rows, tokenizer, apply_chat_template=False)
    ids = whole.token_ids.tolist()
    for max_len in (len(ids) - 1, len(ids) - 2):
        dataset = build(rows, tokenizer, apply_chat_template=False, max_len=max_len)
        assert dataset[0].token_ids.tolist() == ids[:max_len]
        assert dataset.truncated == 1
    assert build(rows, tokenizer, apply_chat_template=False, max_len=len(ids)).truncated == 0


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tokenizer):
    rows = [
        {"input": "u", "output": "fine"},
        {"input": "u", "output": ""},
        {"input": "", "output": "a"},
        {"input": "1 2 3 4 5 6 7 8 9", "output": "a"},
    ]
    dataset = build(rows, tokenizer, apply_chat_template=False, max_len=12)
    assert len(dataset) == 1
    assert dataset.skipped == {
        "nothing to learn (empty prompt or answer)": 2,
        "prompt of max_len - 2 tokens or more": 1,
    }
    longest, options = dataset.needed_len, {"apply_chat_template": False}
    kept = [len(build(rows, tokenizer, **options, max_len=length)) for length in (longest - 1, longest)]
    assert kept == [1, 2]
    assert list(dataset.lengths) == [dataset[0].length]
    assert build([rows[0], {"input": "u", "output": ""}], tokenizer).skipped == {
        "nothing to learn (empty prompt or answer)": 1
    }


def test_a_prompt_may_have_max_len_minus_three_tokens(tokenizer):
    rows = [{"input": "12345", "output": "67"}]
    (sample,) = build(rows, tokenizer, apply_chat_template=False, max_len=8)
    assert sample.token_ids.tolist() == [*encode(tokenizer, "1234567"), tokenizer.eos_token_id]
    with refused(ErrorCode.NO_ROWS, value="rows.json") as told:
        build(rows, tokenizer, apply_chat_template=False, max_len=7)
    assert told.value.text.startswith(f"no sample is left of 1 row: 1 × {LONG_PROMPT}")


def test_losses_are_told_with_the_length_that_would_keep_every_row(tokenizer, caplog, monkeypatch):
    rows = [{"input": "12", "output": "345"}, {"input": "123456", "output": "7"}]
    samples = build(rows, tokenizer, apply_chat_template=False, max_len=5)
    log_skipped(build(rows, tokenizer, apply_chat_template=False, max_len=9), "--data.dataset")
    assert not caplog.messages
    for room in (None, 9, 8):
        log_skipped(samples, "--data.dataset", room)
    said = (
        f"--data.dataset: of 2 rows 1 were dropped (1 × {LONG_PROMPT}), 1 were truncated at --data.max_len;\n"
        "--data.max_len 9 would keep every row whole"
    )
    assert caplog.messages == [said, said, f"{said}, but the model reads at most 8"]
    monkeypatch.setenv("RANK", "1")
    log_skipped(samples, "--data.dataset")
    assert len(caplog.messages) == 3


BAD = {
    "null": ({"input": None, "output": "a"}, "'input' is null"),
    "missing": ({"input": "u"}, "'output' is missing"),
    "number": ({"input": "u", "output": 3}, "'output' is a number"),
    "a string in a list": ({"input": ["u"], "output": "a"}, "message 1"),
    "no assistant": ({"input": "u", "output": [{"role": "user", "content": "x"}]}, "role 'user'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(tokenizer, case):
    row, reason = BAD[case]
    rows = [{"input": "u", "output": "a"}, row]
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=2, told=(reason, REMEDY)):
        build(rows, tokenizer)
    dataset = build(rows, tokenizer, bad_rows="skip")
    assert len(dataset) == 1
    assert dataset.skipped == {"bad row": 1}


def test_a_bad_row_of_a_file_is_named_with_its_line(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"input": "u", "output": "a"}, {"input": "u"}))
    )
    rows = load_rows(str(path), flag="--data.dataset", required_columns={"--data.output_key": "output"})
    with refused(ErrorCode.INVALID_ROW, value=path, row=2):
        build_sft_samples(rows, tokenizer, **OPTIONS)


class LetterTokenizer(PreTrainedTokenizer):
    """Tokenizer in Python, which has no offsets."""

    def __init__(self, **options):
        super().__init__(eos_token="$", **options)

    @property
    def vocab_size(self):
        return 128

    def get_vocab(self):
        return {chr(i): i for i in range(128)} | self.added_tokens_encoder

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_a_tokenizer_without_offsets():
    tokenizer = LetterTokenizer()
    assert not tokenizer.is_fast
    tokenizer.chat_template = NO_SPECIAL_TOKENS
    (sample,) = build([{"input": TALK}], tokenizer, output_key=None, multiturn=True)
    text = "user: u1\n\nassistant: a1\n\nuser: u2\n\nassistant: a2$"
    assert tokenizer.decode(sample.token_ids) == text
    learned = "".join("^" if learned else " " for learned in sample.action_mask.tolist())
    assert learned == "".join("^" if i in (21, 22, 46, 47, 48) else " " for i in range(len(text)))
