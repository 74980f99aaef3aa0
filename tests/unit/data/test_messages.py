"""Conversations with tools: the same tokens from every format, in the forms that chat templates read."""

import csv
import json
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import datasets
import pyarrow as pa
import pytest
import records
from refusals import refused
from template_families import tokenizer_of

from openrlhf.agents.chat_stream import ChatStream
from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.ppo import PromptDataConfig
from openrlhf.config.supervised import ImageDataConfig, KTODataConfig
from openrlhf.data.inference import build_answers, build_questions
from openrlhf.data.messages import is_blank, is_learned
from openrlhf.data.preference import build_pairs
from openrlhf.data.prompts import build_prompts
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows, load_rows
from openrlhf.data.templates import as_messages, read_tools, render_messages
from openrlhf.data.unpaired import build_unpaired
from openrlhf.errors import ErrorCode
from openrlhf.models.generation import Generated
from openrlhf.rewards.models import RewardReader
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.text import decode
from openrlhf.tools.serve.answering import Recorder, requests_for

CALLS = (
    "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
)
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}" + CALLS + "{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
APPENDS = TEMPLATE.replace(
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}",
    "{{ 'CALL ' + c.function.name + ' ' + c.function.arguments }}",
)
TAKES_PARTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ '[image]' if part['type'] == 'image' else part['text'] }}"
    "{{ '\n' }}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = TEMPLATE.replace(CALLS, "")
CHAT = {"apply_chat_template": True, "input_template": None, "max_len": 1000}
SFT_OPTIONS = CHAT | {"input_key": "messages", "output_key": None, "multiturn": True, "pretrain": False}


def with_template(template=TEMPLATE):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def row(question, name, arguments, result, answer, **parameters):
    asked = [{"role": "user", "content": question, "name": None}]
    call = {"type": "function", "id": None, "function": {"name": name, "arguments": arguments}}
    talk = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return {
        "messages": talk,
        "tools": [tool(name, **parameters)],
        "prompt": asked,
        "chosen": talk[1:],
        "rejected": [{"role": "assistant", "content": "no"}],
    }


ROWS = [
    row("weather", "weather", {"city": "Rome"}, "sunny", "It is sunny.", city={"type": "string", "n": None}),
    row("files", "ls", {"path": "/", "depth": {"most": 2, "least": None}}, "a", "There is a.", path="string"),
]
PROMPTS = [
    'TOOLS [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}'
    "}]<|end|><|user|>weather<|end|><|assistant|>",
    'TOOLS [{"type": "function", "function": {"name": "ls", "parameters": {"path": "string"}}}]'
    "<|end|><|user|>files<|end|><|assistant|>",
]
CALLED = ['CALL weather {"city": "Rome"}<|end|>', 'CALL ls {"path": "/", "depth": {"most": 2}}<|end|>']
ENDED = ["It is sunny.<|end|>", "There is a.<|end|>"]
WHOLE = [
    f"{prompt}{called}<|tool|>{result}<|end|><|assistant|>{ended}"
    for prompt, called, result, ended in zip(PROMPTS, CALLED, ("sunny", "a"), ENDED, strict=True)
]


def write_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows({key: json.dumps(value) for key, value in row.items()} for row in ROWS)


def write_lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_texts_as_lines(path):
    """The arguments are JSON text, as in OpenAI's format."""
    rows = json.loads(json.dumps(ROWS))
    for talk in chain.from_iterable((row["messages"], row["chosen"]) for row in rows):
        for call in chain.from_iterable(message.get("tool_calls", ()) for message in talk):
            call["function"]["arguments"].get("depth", {}).pop("least", None)
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_arrow(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


FORMATS = {
    "rows.jsonl": write_lines,
    "texts.jsonl": write_texts_as_lines,
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "rows.csv": write_csv,
    "rows.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(path),
    "rows.arrow": write_arrow,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_format_have_the_same_tokens(tmp_path, name):
    FORMATS[name](tmp_path / name)
    columns = {f"--data.{column}_key": column for column in ROWS[0]}
    rows = load_rows(str(tmp_path / name), flag="--data.dataset", required_columns=columns)
    tokenizer, tools = with_template(), {"tools_key": "tools"}

    samples = build_sft_samples(rows, tokenizer, **SFT_OPTIONS, **tools)
    assert [decode(tokenizer, sample.token_ids.tolist()) for sample in samples] == WHOLE
    learned = [decode(tokenizer, sample.token_ids[sample.action_mask].tolist()) for sample in samples]
    assert learned == [called + ended for called, ended in zip(CALLED, ENDED, strict=True)]

    pair_keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    for score_last_token in (False, True):
        pairs = build_pairs(rows, tokenizer, **CHAT, **pair_keys, **tools, score_last_token=score_last_token)
        assert [decode(tokenizer, pair.chosen.token_ids.tolist()) for pair in pairs] == WHOLE
        rejected = [decode(tokenizer, pair.rejected.token_ids.tolist()) for pair in pairs]
        assert rejected == [f"{prompt}no<|end|>" for prompt in PROMPTS]

    prompts = build_prompts(rows, tokenizer, **CHAT, **tools, input_key="prompt", label_key=None)
    assert [prompt.text for prompt in prompts] == PROMPTS


def test_other_commands_list_the_tools_too():
    tokenizer, rows = with_template(), Rows.of([row | {"label": True} for row in ROWS])
    kto = build_unpaired(
        rows, tokenizer, **CHAT, input_key="prompt", output_key="chosen", label_key="label", seed=0,
        tools_key="tools",
    )  # fmt: skip
    assert [decode(tokenizer, kto[i].sample.token_ids.tolist()) for i in range(2)] == WHOLE
    keys = CHAT | {"input_key": "prompt", "tools_key": "tools"}
    questions = build_questions(rows, [0, 1], tokenizer, suffix=None, **keys)
    assert [decode(tokenizer, question.token_ids) for question in questions] == PROMPTS
    answered: list[dict] = []
    recorder = Recorder().begin(SimpleNamespace(append=answered.extend), mock.Mock(total=2))
    generated = [Generated(token_ids=[], finish_reason="length")] * 2
    recorder.answers(tokenizer)(requests_for(questions, num_samples=1, run_seed=0), generated)
    assert [row["tools"] for row in answered] == [read_tools(row, "tools") for row in ROWS]
    answers = build_answers(rows, tokenizer, output_key="chosen", **keys)
    assert [decode(tokenizer, answer.sample.token_ids.tolist()) for answer in answers] == WHOLE
    recorder.scores(0.0, 1.0)(answers, [1.0, 2.0])
    assert [row["tools"] for row in answered[2:]] == [row["tools"] for row in answered[:2]]


def test_a_reward_model_with_another_template_lists_the_tools():
    policy, own = tiny_tokenizer(), with_template()
    policy.chat_template = TEMPLATE + "\n"
    (prompt, _) = build_prompts(
        Rows.of(ROWS), policy, **CHAT, input_key="prompt", label_key=None, tools_key="tools"
    )
    reader = RewardReader(policy, own, stop_token_ids=[], max_len=None)
    read, said = (policy(text, add_special_tokens=False)["input_ids"] for text in (prompt.text, "Yes."))
    mask = [False] * len(read) + [True] * len(said)
    sample = reader(records.trajectory(prompt=prompt, token_ids=read + said, action_mask=mask))
    assert own.decode(sample.token_ids) == f"{PROMPTS[0]}Yes.<|end|>"


def test_a_refusal_is_the_text_of_an_answer():
    for said in (None, [{"type": "refusal", "refusal": "no"}]):
        answer = {"role": "assistant", "content": said} | ({} if said else {"refusal": "no"})
        talk = as_messages([{"role": "user", "content": "q"}, answer])
        text = render_messages(talk, tiny_tokenizer(), add_generation_prompt=False)
        assert text == "<|user|>q<|end|><|assistant|>no<|end|>"


def test_json_text_keeps_its_nulls():
    arguments = '{"limit": null, "city": "R\\u00f3ma"}'
    (sample,) = build_sft_samples(
        Rows.of([row("q", "f", arguments, "r", "a")]), with_template(), **SFT_OPTIONS
    )
    shown = decode(with_template(), sample.token_ids.tolist())
    assert 'CALL f {"limit": null, "city": "Róma"}<|end|>' in shown


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_a_template_that_appends_the_arguments_gets_text(arguments):
    tokenizer = with_template(APPENDS)
    (sample,) = build_sft_samples(Rows.of([row("q", "f", arguments, "r", "a")]), tokenizer, **SFT_OPTIONS)
    assert 'CALL f {"city": "Rome"}<|end|>' in decode(tokenizer, sample.token_ids.tolist())


@pytest.mark.parametrize(
    "call",
    [{"tool_calls": [{"name": "f", "arguments": "{}"}]}, {"function_call": {"name": "f", "arguments": "{}"}}],
)
def test_flat_and_earlier_forms_of_a_call(call):
    result = {"role": "function", "name": "f", "content": "r"}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None} | call, result]
    talk += [{"role": "assistant", "content": "a"}]
    tokenizer, tools = with_template(), [{"name": "f", "parameters": {}}]
    rows = Rows.of([{"messages": talk, "tools": tools}])
    (sample,) = build_sft_samples(rows, tokenizer, **SFT_OPTIONS, tools_key="tools")
    assert decode(tokenizer, sample.token_ids.tolist()) == (
        'TOOLS [{"type": "function", "function": {"name": "f", "parameters": {}}}]<|end|>'
        "<|user|>q<|end|><|assistant|>CALL f {}<|end|><|tool|>r<|end|><|assistant|>a<|end|>"
    )


def test_a_template_that_writes_no_calls_is_refused():
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1) as told:
        build_sft_samples(Rows.of(ROWS), with_template(CHATML), **SFT_OPTIONS)
    assert "leaves out the calls of message 2 (assistant)" in told.value.text


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CHATML, ""),
        (CHATML + "{{ '' if tools is not none }}", ""),
        (CHATML.replace("{{ m['content'] }}", "{{ '-' if m['content'] is none else m['content'] }}"), "-"),
    ],
)
def test_only_a_template_that_looks_for_it_meets_a_content_that_is_null(template, content):
    messages = [{"role": "user"}, {"role": "assistant", "content": None}]
    assert ChatStream(with_template(template)).render(messages, answering=False) == (
        f"<|user|>{content}<|end|><|assistant|>{content}<|end|>"
    )


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(("template", "shown"), [(CHATML, "one two"), (TAKES_PARTS, "one \ntwo\n")])
def test_parts_are_joined_where_the_template_takes_text(template, shown):
    tokenizer = with_template(template)
    talk = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]
    options = SFT_OPTIONS | {"multiturn": False}
    (sample,) = build_sft_samples(Rows.of([{"messages": talk}]), tokenizer, **options)
    assert (
        decode(tokenizer, sample.token_ids.tolist()) == f"<|user|>{shown}<|end|><|assistant|>{shown}<|end|>"
    )
    (prompt,) = build_prompts(
        Rows.of([{"messages": talk[:1]}]), tokenizer, **CHAT, input_key="messages", label_key=None
    )
    assert prompt.text == f"<|user|>{shown}<|end|><|assistant|>"
    assert ChatStream(tokenizer).render(talk[:1]) == prompt.text


def test_a_part_that_is_no_text_is_refused_where_the_template_takes_text():
    other = {"type": "input_text", "text": "three"}
    talk = [{"role": "user", "content": [*PARTS, other]}, {"role": "assistant", "content": "x"}]
    build_sft_samples(Rows.of([{"messages": talk}]), with_template(TAKES_PARTS), **SFT_OPTIONS)
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1):
        build_sft_samples(Rows.of([{"messages": talk}]), with_template(CHATML), **SFT_OPTIONS)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "video", "input_audio"])
@pytest.mark.parametrize("template", [TAKES_PARTS, CHATML], ids=["parts", "text"])
def test_pictures_and_sound_are_refused_where_nothing_reads_them(template: str, kind: str) -> None:
    """Templates write a placeholder for them, or nothing."""
    asked = [{"role": "user", "content": [{"type": kind}, *PARTS]}]
    rows = Rows.of([{"messages": [*asked, {"role": "assistant", "content": "x"}], "asked": asked}])
    tokenizer, of_prompts = with_template(template), CHAT | {"input_key": "asked"}
    for build in (
        lambda: build_sft_samples(rows, tokenizer, **SFT_OPTIONS),
        lambda: build_prompts(rows, tokenizer, **of_prompts, label_key=None),
        lambda: build_questions(rows, [0], tokenizer, **of_prompts, suffix=None),
    ):
        with refused(ErrorCode.INVALID_ROW, value="rows", row=1) as told:
            build()
        assert f"message 1 (user) has a part of the type {kind}, which is not read here" in told.value.text


READS_TEXT_PARTS = TAKES_PARTS.replace("else part['text']", "else part['text'] if part['type'] == 'text'")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "thinking", "thinking": "Hm.", "signature": "s"}, "the thoughts of message 2 (assistant)"),
        ({"type": "output_text", "text": "Hm."}, "the output_text part of message 2 (assistant)"),
    ],
    ids=["thinking", "output_text"],
)
def test_a_part_that_the_template_leaves_out_is_refused(part: dict, said: str) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [part, *PARTS]}]
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1) as told:
        build_sft_samples(Rows.of([{"messages": talk}]), with_template(READS_TEXT_PARTS), **SFT_OPTIONS)
    assert f"leaves out {said}" in told.value.text
    writes = with_template(TAKES_PARTS.replace("else part['text']", "else part['text'] or part['thinking']"))
    (sample,) = build_sft_samples(Rows.of([{"messages": talk}]), writes, **SFT_OPTIONS)
    assert decode(writes, sample.token_ids.tolist()) == (
        "<|user|>q<|end|><|assistant|>Hm.\none \ntwo\n<|end|>"
    )


@pytest.mark.parametrize("template", [TAKES_PARTS, CHATML], ids=["parts", "text"])
def test_the_result_of_a_tool_in_parts_is_text(template: str) -> None:
    """GLM-4.5's template reads the parts of a question, and writes those of a result as Python does."""
    talk = [{"role": "user", "content": "q"}, {"role": "tool", "content": PARTS}]
    shown = render_messages(as_messages(talk), with_template(template), add_generation_prompt=False)
    assert shown == "<|user|>q<|end|><|tool|>one two<|end|>"


@pytest.mark.parametrize(
    ("writes", "is_kept"), [("c.function.arguments | tojson", False), ("c.function.arguments", True)]
)
def test_arguments_that_are_no_json_are_learned_as_they_are_or_refused(writes: str, is_kept: bool) -> None:
    """A template that writes objects as JSON would write their text as JSON too, between quotes."""
    tokenizer = with_template(TEMPLATE.replace("c.function.arguments | tojson", writes))
    call = {"name": "f", "arguments": '{"a": 1'}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    if is_kept:
        (sample,) = build_sft_samples(Rows.of([{"messages": talk}]), tokenizer, **SFT_OPTIONS)
        assert decode(tokenizer, sample.token_ids.tolist()).endswith('CALL f {"a": 1<|end|>')
        return
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1):
        build_sft_samples(Rows.of([{"messages": talk}]), tokenizer, **SFT_OPTIONS)


def test_an_answer_of_parts_must_be_written_whole():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}]
    rows = Rows.of([{"messages": talk}])
    first_part = TAKES_PARTS.replace("in m['content'] %", "in m['content'][:1] %")
    assert len(build_sft_samples(rows, with_template(TAKES_PARTS), **SFT_OPTIONS)) == 1
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1) as told:
        build_sft_samples(rows, with_template(first_part), **SFT_OPTIONS)
    assert "leaves out the content of message 2 (assistant)" in told.value.text


def test_text_that_is_no_conversation_stays_text():
    for text in ("[1]", "[]", "[", '[{"role": "cook"}]', '{"role": "user", "content": "x"}', "plain"):
        assert as_messages(text) == [{"role": "user", "content": text}]
    talk = [{"role": "user", "content": "x"}]
    assert as_messages(json.dumps(talk), role="assistant") == talk


def test_text_as_python_writes_it_is_a_conversation():
    """pandas writes lists into CSV as `repr` does, and those of NumPy without commas."""
    talk = [
        {"role": "user", "content": 'it\'s "so"'},
        {"role": "assistant", "content": "yes", "weight": None},
    ]
    assert as_messages(repr(talk)) == as_messages(json.dumps(talk)) == as_messages(talk)
    tools = [tool("f", x="string")]
    assert read_tools({"tools": repr(tools)}, "tools") == tools
    assert read_tools({"tools": [json.dumps(own) for own in tools]}, "tools") == tools
    for text in (repr(talk).replace("}, {", "}\n {"), json.dumps(talk).replace('"yes"', '"yes')):
        with refused(ErrorCode.INVALID_ROW, told=("looks like messages", "json.dumps")):
            as_messages(text)


@pytest.mark.parametrize("mark", [{"masked": True}, {"train_detail": [{"begin_offset": 0, "train": False}]}])
def test_marks_of_parts_of_an_answer_are_refused(mark: dict) -> None:
    with refused(ErrorCode.INVALID_ROW, told=(next(iter(mark)), '"weight"')):
        as_messages([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"} | mark])
    as_messages(
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"} | dict.fromkeys(mark)]
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"answer": 4}, "is an object, not text"),
        (4, "is a number, not text"),
        (True, "is true or false, not text"),
        (["4"], "is text, not of the form"),
        ([{"text": "4"}], "is {'text': '4'}, not of the form"),
        ([{"type": "text", "text": "4"}, None], "is null, not of the form"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_content_is_text_or_a_list_of_parts(content: object, reason: str, role: str) -> None:
    """A template would write what Python prints for it."""
    talk = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    talk[role == "assistant"]["content"] = content
    with refused(ErrorCode.INVALID_ROW, value="rows", row=1, told=(reason, f"({role})")):
        build_sft_samples(Rows.of([{"messages": talk}]), with_template(), **SFT_OPTIONS)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("glm4moe", {"sky": "clear"}),
        ("glm4moe", [{"type": "json", "sky": "clear"}]),
        ("lfm2_2_5", {"sky": "clear"}),
        ("muse_glimmer", {"sky": "clear"}),
    ],
)
def test_no_template_writes_the_keys_of_a_result_alone(name: str, result: object) -> None:
    """These look for a mapping among arguments, and go through the keys of an object, or write it as Python
    does."""
    talk = [*ROWS[0]["messages"][:2], {"role": "tool", "content": result}, ROWS[0]["messages"][3]]
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1):
        build_sft_samples(Rows.of([{"messages": talk}]), tokenizer_of(name), **SFT_OPTIONS)


def test_the_result_of_a_tool_is_an_object_only_where_the_template_reads_one() -> None:
    rows = Rows.of([ROWS[0] | {"messages": [dict(message) for message in ROWS[0]["messages"]]}])
    rows[0]["messages"][2]["content"] = {"sky": "clear"}
    reads = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if m['content'] is mapping %}{{ m['content'] | tojson }}{% else %}{{ m['content'] }}{% endif %}",
    )
    (sample,) = build_sft_samples(rows, with_template(reads), **SFT_OPTIONS)
    assert '<|tool|>{"sky": "clear"}<|end|>' in decode(with_template(), sample.token_ids.tolist())
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows", row=1, told="the result of a tool is an object"):
        build_sft_samples(rows, with_template(), **SFT_OPTIONS)


@pytest.mark.parametrize(
    "blank", ["", " \n", [], [{"type": "text", "text": ""}, {"type": "text", "text": " "}]]
)
def test_blank_messages_teach_and_ask_nothing(blank: object, capsys) -> None:
    asked, tokenizer = [{"role": "user", "content": "2+2"}], with_template()
    rows = [{"messages": [*asked, {"role": "assistant", "content": content}]} for content in (blank, "4")]
    samples = build_sft_samples(Rows.of(rows), tokenizer, **SFT_OPTIONS)
    assert len(samples) == 1 and samples.skipped.total() == 1
    for content in ("2+2", blank):
        assert "empty" not in capsys.readouterr().err
        rows = Rows.of([{"messages": [{"role": "user", "content": content}]}])
        build_prompts(rows, tokenizer, **CHAT, input_key="messages", label_key=None)
    assert "a prompt is empty" in capsys.readouterr().err


def test_an_answer_at_the_head_of_a_conversation_is_context_alone() -> None:
    talk = [{"role": role, "content": role} for role in ("assistant", "user", "assistant")]
    with refused(ErrorCode.INVALID_ROW, value="rows", row=1, told=("begins with an answer", '"weight": 0')):
        build_sft_samples(Rows.of([{"messages": talk}]), with_template(), **SFT_OPTIONS)
    talk[0]["weight"] = 0
    (sample,) = build_sft_samples(Rows.of([{"messages": talk}]), with_template(), **SFT_OPTIONS)
    assert decode(with_template(), sample.token_ids[sample.action_mask].tolist()) == "assistant<|end|>"


def test_turns_with_calls_alone_do_not_lack_an_end(caplog):
    build_sft_samples(Rows.of(ROWS), with_template(), **SFT_OPTIONS)
    assert not caplog.text


def test_a_template_that_writes_no_tools_is_pointed_out(capsys):
    rows = Rows.of([{"messages": ROWS[0]["prompt"], "tools": ROWS[0]["tools"]}] * 2)
    options = CHAT | {"input_key": "messages", "label_key": None}
    build_prompts(rows, with_template(), **options, tools_key="tools")
    build_prompts(rows, with_template(TAKES_PARTS), **options, tools_key=None)
    assert "tools" not in capsys.readouterr().err
    build_prompts(rows, with_template(TAKES_PARTS), **options, tools_key="tools")
    assert capsys.readouterr().err.count("the chat template writes no tools") == 1


@pytest.mark.parametrize("tools", ["search", ["search"], {"name": "search"}, '"search"'])
def test_a_column_that_holds_no_tools_is_refused(tools):
    rows = Rows.of([{"messages": ROWS[0]["prompt"], "tools": tools}])
    options = CHAT | {"input_key": "messages", "label_key": None}
    with refused(ErrorCode.INVALID_ROW, value="rows", row=1):
        build_prompts(rows, with_template(), **options, tools_key="tools")
    build_prompts(rows, with_template(), **options, tools_key=None)
    for empty in ([], None, "", "[]"):
        build_prompts(Rows.of([rows[0] | {"tools": empty}]), with_template(), **options, tools_key="tools")


@pytest.mark.parametrize(
    "config_type", [ImageDataConfig, KTODataConfig, PromptDataConfig, InferenceDataConfig]
)
def test_a_column_of_tools_must_exist_if_a_flag_names_it(config_type):
    named = lambda **options: config_type(**options).tools_column
    assert named(apply_chat_template=True) is None
    assert named(apply_chat_template=True, tools_key="functions") == "functions"
    assert named(apply_chat_template=True, tools_key=None) is None
    assert named(tools_key="functions") is None


def test_a_conversation_that_no_memory_tokenises_is_refused(monkeypatch):
    monkeypatch.setattr("openrlhf.data.templates.MAX_TEXT", 100)
    with refused(ErrorCode.INVALID_ROW, value="rows", row=1):
        build_sft_samples(Rows.of(ROWS), with_template(), **SFT_OPTIONS)


def test_messages_in_the_form_of_sharegpt() -> None:
    senders = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool"}
    talk = [{"from": sender, "value": sender.upper()} for sender in senders]
    expected = [{"role": role, "content": sender.upper()} for sender, role in senders.items()]
    table = [message | {"role": None, "content": None} for message in talk]
    for value in (talk, json.dumps(talk), table, expected):
        assert as_messages(value) == expected
    call = {"name": "f", "arguments": {}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    for value in (call, [call]):
        said = {"from": "function_call", "value": json.dumps(value)}
        assert as_messages([talk[1], said]) == [expected[1], called]
    with refused(ErrorCode.INVALID_ROW):
        as_messages([talk[1], {"from": "bing", "value": "{}"}])
    plain = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    for who, what in (("role", "content"), ("role", "value"), ("from", "content")):
        assert as_messages([{who: "human", what: "Hi."}, {who: "gpt", what: "Ho."}]) == plain


@pytest.mark.parametrize("caller", ["tool_call", "function_call"])
def test_roles_by_other_names(caller: str, capsys) -> None:
    """ms-swift and LLaMA-Factory give calls a role of their own, Gemini calls the assistant the model."""
    call = {"name": "f", "arguments": {"a": 1}}
    named = [
        {"role": "User", "content": "hi"},
        {"role": caller, "content": json.dumps(call)},
        {"role": "tool_response", "content": "3"},
        {"role": "Assistant", "content": "4"},
        {"role": "user", "content": "ho"},
        {"role": "model", "content": "5"},
    ]
    found = as_messages(named)
    assert [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert found[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert as_messages([{"role": "observation", "content": "3"}])[0]["role"] == "observation"
    assert "note" not in capsys.readouterr().err


def test_a_role_that_no_template_knows_is_noted(capsys) -> None:
    assert as_messages([{"role": "critic", "content": "3"}])[0]["role"] == "critic"
    assert "note: the role 'critic' of a message" in capsys.readouterr().err


@pytest.mark.parametrize(
    "calls",
    ['[{"name": "f", "arguments": {}}]', '{"name": "f", "arguments": {}}', {"name": "f", "arguments": {}}],
)
def test_calls_as_text_and_single_ones(calls: object) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    (found,) = as_messages([called])
    assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    "calls", ["f(x)", ["f(x)"], [{"arguments": {}}], [{"function": "f"}], [{"function": {}}]]
)
def test_calls_without_a_name_are_refused(calls: object) -> None:
    """Templates without calls would leave them out, and others would fail on them."""
    with refused(ErrorCode.INVALID_ROW) as refusal:
        as_messages(
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        )
    assert "a call of message 2 (assistant) is" in refusal.value.text


@pytest.mark.parametrize("arguments", ["", None, "{}", {}, ...])
@pytest.mark.parametrize("template", [TEMPLATE, APPENDS], ids=["object", "text"])
def test_a_call_without_arguments_has_an_empty_object(template: str, arguments: object) -> None:
    """Servers of OpenAI's API write an empty text, a table null."""
    call = {"name": "ls"} | ({} if arguments is ... else {"arguments": arguments})
    talk = [ROWS[0]["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render_messages(as_messages(talk), with_template(template), add_generation_prompt=False)
    assert text.endswith("CALL ls {}<|end|>")


def test_thoughts_alone_are_an_answer() -> None:
    template = CHATML.replace("<|end|>", "{{ m.reasoning_content }}<|end|>")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "thinking": "hm"}]
    assert not is_blank(talk[1]) and is_blank(talk[1] | {"thinking": " "})
    store = build_sft_samples(Rows.of([{"messages": talk}]), with_template(template), **SFT_OPTIONS)
    assert len(store) == 1


@pytest.mark.parametrize(
    ("marks", "learned"),
    [
        ({}, True),
        ({"weight": None}, True),
        ({"weight": 1, "loss": True}, True),
        ({"weight": 0}, False),
        ({"loss": False}, False),
        ({"train": 0.0, "weight": 1}, False),
        ({"training": False}, False),
        ({"trainable": False}, False),
        ({"loss_mask": 0}, False),
        ({"step_loss_mask": 0}, False),
        ({"loss_weight": 0}, False),
        ({"loss_scale": 0.0}, False),
    ],
)
def test_an_answer_is_learned_unless_its_weight_is_0(marks: dict, learned: bool) -> None:
    """Rows of Parquet have null for the marks that other rows have."""
    assert is_learned({"role": "assistant", "content": "4"} | marks) == learned
