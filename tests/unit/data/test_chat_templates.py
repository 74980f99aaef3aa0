"""Tokens that are read and tokens that are learned under the chat templates of five families of models,
written out."""

import resource
import time
from datetime import date

import pytest
from chat_models import ALL, MODELS, tokenizer_of
from marked import marked
from refusals import refused

from openrlhf.data.preference import build_pairs
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.data.templates import PromptTemplate, _note_missing_header
from openrlhf.data.unpaired import build_unpaired
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.text import Calendar


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@ALL
def test_every_family_begins_answers(name, capsys):
    _note_missing_header.__wrapped__(tokenizer_of(name))
    assert not capsys.readouterr().err


SYSTEM = {"role": "system", "content": "Be brief."}


def sft(name, messages, *, multiturn=False, bad_rows="error"):
    """Returns the marked text of a conversation."""
    tokenizer = tokenizer_of(name)
    (sample,) = build_sft_samples(
        Rows.of([{"talk": messages}], "rows.json"),
        tokenizer,
        input_key="talk",
        output_key=None,
        apply_chat_template=True,
        input_template=None,
        multiturn=multiturn,
        pretrain=False,
        max_len=512,
        bad_rows=bad_rows,
    )
    check_tokens(sample, tokenizer)
    return marked(sample, tokenizer)


def check_tokens(sample, tokenizer):
    """Checks that the tokens up to the first learned one are those of the prompt as a policy reads it, and
    that all tokens are those of the text."""
    text = tokenizer.decode(sample.token_ids)
    assert sample.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token:
        assert sample.token_ids.tolist().count(tokenizer.bos_token_id) == 1


def pair(name, *, score_last_token):
    """Returns the marked texts of both answers."""
    tokenizer = tokenizer_of(name)
    (found,) = build_pairs(
        Rows.of([{"prompt": "Hi.", "chosen": "Hello there.", "rejected": "No."}]),
        tokenizer,
        prompt_key="prompt",
        chosen_key="chosen",
        rejected_key="rejected",
        apply_chat_template=True,
        input_template=None,
        max_len=512,
        score_last_token=score_last_token,
    )
    check_tokens(found.chosen, tokenizer)
    check_tokens(found.rejected, tokenizer)
    return marked(found.chosen, tokenizer), marked(found.rejected, tokenizer)


LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
QWEN_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
)

PROMPTS = {
    "llama3.1": (
        LLAMA_SYSTEM + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "qwen2.5": QWEN_SYSTEM + "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
    "gemma2": "<bos><start_of_turn>user\nHi.<end_of_turn>\n<start_of_turn>model\n",
    "gemma3": "<bos><start_of_turn>user\nHi.<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v0.3": "<s>[INST] Hi.[/INST]",
}
ANSWERS = {
    "llama3.1": "⟦Hello there.<|eot_id|>⟧",
    "qwen2.5": "⟦Hello there.<|im_end|>⟧",
    "qwen3": "⟦<think>\n\n</think>\n\nHello there.<|im_end|>⟧",
    "gemma2": "⟦Hello there.<end_of_turn><eos>⟧",
    "gemma3": "⟦Hello there.<end_of_turn><eos>⟧",
    "mistral-v0.3": "⟦ Hello there.</s>⟧",
}


@ALL
def test_one_turn(name):
    assert sft(name, [user("Hi."), assistant("Hello there.")]) == PROMPTS[name] + ANSWERS[name]
    assert (
        sft(name, [user("Hi."), assistant("Hello there.")], multiturn=True) == PROMPTS[name] + ANSWERS[name]
    )


@ALL
def test_the_prompt_is_what_the_policy_reads(name):
    """The text is the same, and token by token what RL would give the policy."""
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.apply_chat_template([user("Hi.")], tokenize=False, add_generation_prompt=True)
    assert prompt == PROMPTS[name]
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    (sample,) = build_sft_samples(
        Rows.of([{"input": "Hi.", "output": "Hello there."}]),
        tokenizer,
        input_key="input",
        output_key="output",
        apply_chat_template=True,
        input_template=None,
        multiturn=False,
        pretrain=False,
        max_len=512,
    )
    assert sample.token_ids[: len(ids)].tolist() == ids
    assert sample.action_mask.tolist().index(True) == len(ids)


TALK = [user("Hi."), assistant("Hello there."), user("Go."), assistant("No.")]
TALKS = {
    "llama3.1": (
        LLAMA_SYSTEM + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello there.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nGo.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦No.<|eot_id|>⟧"
    ),
    "qwen2.5": (
        QWEN_SYSTEM + "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n⟦Hello there.<|im_end|>⟧\n"
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n⟦No.<|im_end|>⟧"
    ),
    "gemma2": (
        "<bos><start_of_turn>user\nHi.<end_of_turn>\n<start_of_turn>model\n⟦Hello there.<end_of_turn>⟧\n"
        "<start_of_turn>user\nGo.<end_of_turn>\n<start_of_turn>model\n⟦No.<end_of_turn><eos>⟧"
    ),
    "mistral-v0.3": "<s>[INST] Hi.[/INST]⟦ Hello there.</s>⟧[INST] Go.[/INST]⟦ No.</s>⟧",
}
TALKS["gemma3"] = TALKS["gemma2"]


@pytest.mark.parametrize("name", TALKS)
def test_many_turns(name):
    assert sft(name, TALK, multiturn=True) == TALKS[name]
    before, _, _ = TALKS[name].rpartition("⟦")
    last_alone = before.replace("⟦", "").replace("⟧", "") + TALKS[name][len(before) :]
    assert sft(name, TALK) == last_alone


def test_a_system_message():
    talk = [SYSTEM, user("Hi."), assistant("No.")]
    assert sft("llama3.1", talk) == (
        LLAMA_SYSTEM + "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦No.<|eot_id|>⟧"
    )
    assert sft("qwen2.5", talk) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\n⟦No.<|im_end|>⟧"
    )
    assert sft("gemma3", talk) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi.<end_of_turn>\n"
        "<start_of_turn>model\n⟦No.<end_of_turn><eos>⟧"
    )


def test_gemma2_has_no_system_message():
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1):
        sft("gemma2", [SYSTEM, user("Hi."), assistant("No.")])


def test_mistral_shows_a_system_message_to_the_policy_only():
    """A system message goes into the last message if that is the user's, and is gone once the answer
    follows."""
    tokenizer, talk = tokenizer_of("mistral-v0.3"), [SYSTEM, user("Hi."), assistant("No.")]
    render = lambda messages: tokenizer.apply_chat_template(messages, tokenize=False)
    assert render(talk[:2]) == "<s>[INST] Be brief.\n\nHi.[/INST]"
    assert render(talk) == "<s>[INST] Hi.[/INST] No.</s>"
    for messages, multiturn in ((talk, False), ([SYSTEM, *TALK], True)):
        with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
            sft("mistral-v0.3", messages, multiturn=multiturn)
        assert "leaves out the content of message 1 (system)" in told.value.text


def test_a_thought_of_qwen3_is_learned():
    thought = "<think>\nHi.\n</think>\n\nNo."
    expected = PROMPTS["qwen3"] + f"⟦{thought}<|im_end|>⟧"
    assert sft("qwen3", [user("Hi."), assistant(thought)]) == expected
    apart = assistant("No.") | {"reasoning_content": "Hi."}
    assert sft("qwen3", [user("Hi."), apart]) == expected


def test_qwen3_shows_earlier_turns_without_their_thoughts():
    talk = [user("Hi."), assistant("<think>\nHm.\n</think>\n\nHello there."), *TALK[2:]]
    assert sft("qwen3", talk) == (
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHello there.<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nNo.<|im_end|>⟧"
    )


@pytest.mark.parametrize("first", ["<think>\nHm.\n</think>\n\nHello there.", "Hello there."])
def test_qwen3_cannot_learn_many_turns_at_once(first):
    talk = [user("Hi."), assistant(first), *TALK[2:]]
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
        sft("qwen3", talk, multiturn=True)
    assert "message 2" in told.value.text
    assert ("thoughts" if "<think>" in first else "--data.multiturn") in told.value.text


def test_a_thought_that_qwen3_writes_otherwise_is_refused():
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
        sft("qwen3", [user("Hi."), assistant("No. <think>Hm.</think>Yes.")])
    assert "message 2 of 2" in told.value.text and "--data.multiturn" not in told.value.text


@ALL
def test_both_answers_of_a_pair(name):
    rejected = ANSWERS[name].replace("Hello there.", "No.")
    assert pair(name, score_last_token=False) == (PROMPTS[name] + ANSWERS[name], PROMPTS[name] + rejected)


SCORED = {
    "llama3.1": "Hello there.⟦<|eot_id|>⟧",
    "qwen2.5": "Hello there.⟦<|im_end|>⟧",
    "qwen3": "<think>\n\n</think>\n\nHello there.⟦<|im_end|>⟧",
    "gemma2": "Hello there.<end_of_turn>⟦<eos>⟧",
    "gemma3": "Hello there.<end_of_turn>⟦<eos>⟧",
    "mistral-v0.3": " Hello there.⟦</s>⟧",
}


@ALL
def test_both_answers_of_a_scored_pair(name):
    rejected = SCORED[name].replace("Hello there.", "No.")
    assert pair(name, score_last_token=True) == (PROMPTS[name] + SCORED[name], PROMPTS[name] + rejected)


@ALL
def test_a_mismatched_answer(name):
    tokenizer = tokenizer_of(name)
    rows = [
        {"input": "Hi.", "output": "Go.", "label": True},
        {"input": "Go.", "output": "Hello there.", "label": False},
    ]
    good, _ = build_unpaired(
        Rows.of(rows),
        tokenizer,
        input_key="input",
        output_key="output",
        label_key="label",
        apply_chat_template=True,
        input_template=None,
        max_len=512,
        seed=0,
    )
    assert marked(good.sample, tokenizer) == PROMPTS[name] + ANSWERS[name].replace("Hello there.", "Go.")
    assert marked(good.mismatched, tokenizer) == PROMPTS[name] + ANSWERS[name]


def test_a_full_stop_does_not_swallow_the_line_breaks_behind_a_turn():
    """If no special token ended a turn, its last token could be one that the policy did not write."""
    tokenizer = tokenizer_of("qwen2.5")
    assert [tokenizer.decode([i]) for i in tokenizer("Hello there.\n\n")["input_ids"]][-1] == ".\n\n"
    template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    stock, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        (sample,) = build_sft_samples(
            Rows.of([{"talk": TALK}]),
            tokenizer,
            input_key="talk",
            output_key=None,
            apply_chat_template=True,
            input_template=None,
            multiturn=True,
            pretrain=False,
            max_len=512,
        )
    finally:
        tokenizer.chat_template = stock
    assert marked(sample, tokenizer) == (
        "user:\nHi.\n\nassistant:\n⟦Hello there.⟧\n\nuser:\nGo.\n\nassistant:\n⟦No.<|im_end|>⟧"
    )


def test_spaces_before_a_number_are_read_as_the_policy_reads_them():
    """The spaces alone are one token; a number behind them would take one away."""
    tokenizer = tokenizer_of("qwen2.5")
    pieces = lambda text: [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]
    assert (pieces("Go.   "), pieces("Go.   5")) == (["G", "o", ".", "   "], ["G", "o", ".", "  ", " ", "5"])
    (sample,) = build_sft_samples(
        Rows.of([{"input": "Go.", "output": "5"}]),
        tokenizer,
        input_key="input",
        output_key="output",
        apply_chat_template=False,
        input_template="{}   ",
        multiturn=False,
        pretrain=False,
        max_len=512,
    )
    assert [tokenizer.decode([i]) for i in sample.token_ids.tolist()] == [
        *pieces("Go.   "),
        "5",
        "<|im_end|>",
    ]
    assert marked(sample, tokenizer) == "Go.   ⟦5<|im_end|>⟧"


LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
"""The first template of Llama 3, which writes the header of an answer always."""


def turn(role, text, end="<|eot_id|>"):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}{end}"


@pytest.fixture
def llama3(monkeypatch):
    monkeypatch.setattr(tokenizer_of("llama3.1"), "chat_template", LLAMA3)
    return "<|begin_of_text|>" + turn("user", "Hi.")


def test_a_header_that_follows_the_last_answer_is_not_learned(llama3):
    learned = llama3 + turn("assistant", "⟦Hello there.", "<|eot_id|>⟧")
    assert sft("llama3.1", TALK[:2]) == learned
    again = turn("user", "Go.") + turn("assistant", "⟦No.", "<|eot_id|>⟧")
    assert sft("llama3.1", TALK, multiturn=True) == learned + again
    chosen, rejected = pair("llama3.1", score_last_token=False)
    assert (chosen, rejected) == (learned, llama3 + turn("assistant", "⟦No.", "<|eot_id|>⟧"))


def test_a_score_is_read_before_a_header_that_follows_the_last_answer(llama3):
    scored, _ = pair("llama3.1", score_last_token=True)
    assert scored == llama3 + turn("assistant", "Hello there.", "⟦<|eot_id|>⟧")


HEADER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<END>{% endfor %}<|assistant|>"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(HEADER.replace("<END>", "<|end|>"), id="a header always"),
        pytest.param(HEADER.replace("<END>", ""), id="a header always and no end"),
        pytest.param(
            HEADER.replace("<END>", "{% if m.role == 'assistant' %}<|end|>{% endif %}"),
            id="a header always and an end of answers",
        ),
        pytest.param("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", id="no header"),
        pytest.param(
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}",
            id="an end of the conversation",
        ),
    ],
)
def test_answers_end_with_one_end(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    (sample,) = build_sft_samples(Rows.of([{"talk": [user("hi"), assistant("one")]}]), tokenizer, **TALKS_OF)
    assert marked(sample, tokenizer).endswith("⟦one<|end|>⟧")


TALKS_OF = {
    "input_key": "talk",
    "output_key": None,
    "apply_chat_template": True,
    "input_template": None,
    "multiturn": False,
    "pretrain": False,
    "max_len": 512,
}


def test_a_header_that_cannot_be_told_from_the_end_before_it_is_refused():
    """The first message of a conversation follows a system message, so the header of a question is not known
    without the end before it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|system|>Now.<|end|>" + HEADER.replace("<END>", "<|end|>")
    with refused(ErrorCode.CHAT_TEMPLATE, flag="--data.apply_chat_template") as told:
        build_sft_samples(Rows.of([{"talk": [user("hi"), assistant("one")]}]), tokenizer, **TALKS_OF)
    assert "'<|end|><|assistant|>'" in told.value.text and "--data.tokenizer_chat_template" in told.value.text


@ALL
def test_an_answer_that_ends_itself_is_refused(name):
    model = MODELS[name]
    for end in {model.eos, "<end_of_turn>" if "gemma" in name else model.eos}:
        with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1, told=f"No.{end}"):
            sft(name, [user("Hi."), assistant(f"No.{end}\n")])


def test_an_answer_may_hold_an_end_that_no_template_writes():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HEADER.replace("<END>", "")
    talk = [user("hi"), assistant("one<|end|>")]
    (sample,) = build_sft_samples(Rows.of([{"talk": talk}]), tokenizer, **TALKS_OF)
    assert marked(sample, tokenizer) == "<|user|>hi<|assistant|>⟦one<|end|>⟧"


def test_two_answers_in_a_row_are_refused():
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1, told="messages 2 and 3"):
        sft("qwen2.5", [user("Hi."), assistant("Go."), assistant("No.")])


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        pytest.param([user("hi"), assistant("one")], "one", id="two answers"),
        pytest.param(
            [user("hi"), assistant("one")], [user(" hi\n"), assistant("one")], id="the prompt again"
        ),
        pytest.param("hi ", [user("hi"), assistant("one")], id="the question again"),
        pytest.param(
            [{"role": "system", "content": "Now."}, user("hi")], [user("hi"), assistant("one")], id="its end"
        ),
    ],
)
def test_columns_that_overlap_are_refused(asked, answer):
    row, options = {"talk": asked, "reply": answer}, TALKS_OF | {"output_key": "reply"}
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1, told=("'talk'", "--data.output_key")):
        build_sft_samples(Rows.of([row], "rows.json"), tiny_tokenizer(), **options)


@pytest.mark.processes
@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ 'A' * 3000000000 }}", id="a product"),
        pytest.param(
            "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", id="loops"
        ),
        pytest.param("{% for i in range(1000000000) %}{{ i }}{% endfor %}", id="a range"),
        pytest.param(
            "{% macro a() %}{{ a() }}{% endmacro %}{% generation %}{{ a() }}{% endgeneration %}", id="calls"
        ),
        pytest.param("{% set a = 'A' %}" + "{% set a = a ~ a %}" * 40, id="doubling"),
    ],
)
def test_a_template_without_bounds_is_refused(template):
    tokenizer, start = tiny_tokenizer(), time.process_time()
    tokenizer.chat_template = template + HEADER
    with refused(ErrorCode.CHAT_TEMPLATE, flag="--data.apply_chat_template"):
        build_sft_samples(Rows.of([{"talk": TALK}]), tokenizer, **TALKS_OF)
    assert time.process_time() - start < 5 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**22


def test_a_row_that_takes_a_template_too_far_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HEADER + "{% for i in range(messages[0].content | int) %}{% endfor %}"
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1):
        build_sft_samples(
            Rows.of([{"talk": [user("9" * 9), assistant("")]}], "rows.json"), tokenizer, **TALKS_OF
        )


def test_a_template_writes_the_date_of_the_start(monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M') }}" + HEADER.replace("<END>", "<|end|>")
    monkeypatch.setattr(Calendar, "today", date(2031, 12, 24))
    assert PromptTemplate(tokenizer, True, None)("hi") == "24 Dec 2031 00:00<|user|>hi<|end|><|assistant|>"
    assert "2031-12-24" in capsys.readouterr().err
