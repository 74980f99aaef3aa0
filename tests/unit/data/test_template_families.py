"""The table of docs/models.md: what is learned under the chat templates of families of models, compared with
the whole conversation as transformers renders it, with TRL's marks of answers, and with `renderers`."""

import json
import re
from datetime import date
from itertools import groupby
from pathlib import Path

import pytest
from marked import marked
from template_families import FAMILIES, TEMPLATES, template_of, tokenizer_of

from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.data.templates import PromptTemplate
from openrlhf.errors import UsageError
from openrlhf.text import Calendar

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def a_run_of_another_day(monkeypatch):
    """Two templates write the date: that of the run, not of the moment at which a row is rendered."""
    monkeypatch.setattr(Calendar, "today", date(2024, 2, 29))


def rendered(tokenizer, messages, tools, **options):
    """Returns what transformers renders on the day of the run."""
    options |= {"tools": tools, "strftime_now": Calendar.today.strftime}
    return tokenizer.apply_chat_template(messages, **options)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(city, number=0):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"type": "function", "id": f"call{number:05}", "function": function}


def result(text, number=0):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "weather", "content": text}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
FUNCTION = {"name": "weather", "description": "Tells.", "parameters": PARAMETERS | {"required": ["city"]}}
TOOLS = [{"type": "function", "function": FUNCTION}]
THOUGHT = {"reasoning_content": "Hm."}
TALK = [user("Hi."), assistant("Hello there."), user("Go."), assistant("No.")]
TALKS = {
    "many turns": (TALK, None),
    "system": ([{"role": "system", "content": "Be brief."}, *TALK], None),
    "thoughts": (
        [user("Hi."), assistant("Hello there.", **THOUGHT), user("Go."), assistant("No.", **THOUGHT)],
        None,
    ),
    "a call": (
        [user("Hi."), assistant("", tool_calls=[call("Rome")]), result("hot"), assistant("Hot.")],
        TOOLS,
    ),
    "two calls": (
        [
            user("Hi."),
            assistant("", tool_calls=[call("Rome"), call("Bonn", 1)]),
            result("hot"),
            result("cold", 1),
            assistant("Hot."),
        ],
        TOOLS,
    ),
    "thoughts and a call": (
        [
            user("Hi."),
            assistant("", tool_calls=[call("Rome")], **THOUGHT),
            result("hot"),
            assistant("Hot.", **THOUGHT),
        ],
        TOOLS,
    ),
}


def samples(tokenizer, messages, tools, *, multiturn):
    return build_sft_samples(
        Rows.of([{"talk": messages, "tools": tools}]),
        tokenizer,
        input_key="talk",
        output_key=None,
        apply_chat_template=True,
        input_template=None,
        multiturn=multiturn,
        pretrain=False,
        max_len=100_000,
        tools_key="tools",
    )


def learned(tokenizer, messages, tools):
    """Returns what is learned, every answer or the last, and the sample; what and None if it is refused."""
    for word, multiturn in (("all", True), ("last", False)):
        try:
            (sample,) = samples(tokenizer, messages, tools, multiturn=multiturn)
            return word, sample
        except UsageError:
            continue
    return "no", None


def table():
    """Returns template -> what is learned of each of `TALKS`, from the table in the docs."""
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (.+) \|$", text, re.M)
    return {name: cells.split(" | ") for name, cells in rows if name in FAMILIES}


def test_every_family_is_in_the_table():
    assert [*table()] == [*FAMILIES]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned_is_what_the_table_says_and_as_the_template_renders_it(name):
    tokenizer, found = tokenizer_of(name), []
    for messages, tools in TALKS.values():
        word, sample = learned(tokenizer, messages, tools)
        found.append(word)
        if sample is not None:
            native = [in_own_form(name, message) for message in messages]
            text = rendered(tokenizer, native, tools, tokenize=False)
            assert sample.token_ids[: sample.length].tolist()[:-1] == ended(tokenizer, text)[:-1]
            assert sample.token_ids[-1] in (tokenizer.eos_token_id, ended(tokenizer, text)[-1])
    assert found == table()[name]


def in_own_form(name, message):
    """Returns a message as the family's template reads it when transformers alone renders it."""
    if name in ("idefics3", "smolvlm", "llava_next"):
        return message | {"content": [{"type": "text", "text": message["content"]}]}
    if name == "deepseekv3" and "tool_calls" in message:
        return message | {"tool_calls": [as_text(called) for called in message["tool_calls"]]}
    thought = message.get("reasoning_content")
    return message | ({OWN_NAME[name]: thought} if thought and name in OWN_NAME else {})


def as_text(called):
    function = called["function"]
    return called | {"function": function | {"arguments": json.dumps(function["arguments"])}}


OWN_NAME = {"gptoss": "thinking", "gemma4_v5": "reasoning", "lfm2_2_5": "thinking"}


def ended(tokenizer, text):
    """Returns the tokens of a rendered text, up to the end of its last turn, and the end of the sequence."""
    eos = tokenizer.eos_token
    text = text.rstrip().removesuffix(eos).rstrip()
    return tokenizer(text + eos, add_special_tokens=False)["input_ids"]


def marks(tokenizer, token_ids, mask):
    """Returns the token ids without the end of the sequence and white space at the end, and their marks."""
    kept = ended(tokenizer, tokenizer.decode(token_ids))[:-1]
    assert [*token_ids][: len(kept)] == kept
    return kept, [bool(learns) for learns in mask][: len(kept)]


def check_marks(tokenizer, sample, token_ids, mask, more):
    """Checks that tokens are equal, that what we learn is marked, and that what is marked beyond it is white
    space behind a turn, or one of the texts `more`."""
    own_ids, own = marks(tokenizer, sample.token_ids.tolist(), sample.action_mask.tolist())
    ids, theirs = marks(tokenizer, token_ids, mask)
    assert own_ids == ids
    assert not [i for i in range(len(ids)) if own[i] and not theirs[i]]
    runs = groupby(range(len(ids)), lambda i: theirs[i] and not own[i])
    beyond = {tokenizer.decode([ids[i] for i in run]) for only_theirs, run in runs if only_theirs}
    assert {text for text in beyond if text.strip()} <= {more}
    assert any(own)


TRAINING = [name for name in FAMILIES if (TEMPLATES / f"{name}_training.jinja").exists()]
HEADERS = {"gptoss": "<|start|>assistant", "muse_glimmer": "<|start|>assistant"}
THINKS = ("nemotron_3_ultra", "qwen3_5_think", "qwen3_6", "qwen3_8")
HEADERS |= dict.fromkeys(THINKS, "<think>\n")
"""The end of the generation prompt, which the policy reads and TRL or `renderers` marks."""


@pytest.mark.parametrize("name", [*THINKS, "qwen3", "glm4moe", "gptoss", "muse_glimmer"])
def test_thoughts_within_an_answer_are_those_apart_from_it(name):
    """Rows have them in the text: with <think> or, as policies write them whose prompt ends with it,
    without."""
    tokenizer, asked = tokenizer_of(name), {"role": "user", "content": "1+1?"}
    answer = {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."}
    _, expected = learned(tokenizer, [asked, answer], None)
    for text in ("<think>\nHm.\n</think>\n\nTwo.", "<think>Hm.</think>Two.", "Hm.\n</think>\n\nTwo."):
        _, sample = learned(tokenizer, [asked, {"role": "assistant", "content": text}], None)
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
        assert sample.action_mask.tolist() == expected.action_mask.tolist()
        prompt = PromptTemplate(tokenizer, True, None)([asked, {"role": "assistant", "content": text[:-2]}])
        assert tokenizer.decode(expected.token_ids).startswith(prompt) and prompt.endswith("Tw")


@pytest.mark.parametrize("name", TRAINING)
def test_answers_that_the_template_of_trl_marks_are_learned(name):
    """With TRL's variant for training, whose `generation` blocks mark the answers, as the template."""
    tokenizer = tokenizer_of(name, template_of(f"{name}_training"))
    for messages, tools in TALKS.values():
        word, sample = learned(tokenizer, messages, tools)
        if word == "all":
            native = [in_own_form(name, message) for message in messages]
            found = rendered(tokenizer, native, tools, return_dict=True, return_assistant_tokens_mask=True)
            check_marks(tokenizer, sample, found["input_ids"], found["assistant_masks"], HEADERS.get(name))


RENDERERS = {
    "qwen3": "Qwen3",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5_think": "Qwen35",
    "qwen3_6": "Qwen36",
    "qwen3_8": "Qwen38",
    "llama3_1": "Llama3",
    "nemotron_3_ultra": "Nemotron3Ultra",
}


@pytest.mark.parametrize("name", RENDERERS)
def test_tokens_that_renderers_calls_sampled_are_learned(name):
    """Where the whole conversation is learned: renderers marks what a policy would have sampled."""
    reason = "needs the package renderers, which verifiers brings: pip install renderers"
    renderers = pytest.importorskip("renderers", reason=reason)
    configs = pytest.importorskip("renderers.configs", reason=reason)
    tokenizer, compared = tokenizer_of(name), 0
    renderer = renderers.create_renderer(tokenizer, getattr(configs, f"{RENDERERS[name]}RendererConfig")())
    for messages, tools in TALKS.values():
        word, sample = learned(tokenizer, messages, tools)
        if word == "all":
            found = renderer.render(messages, tools=tools)
            check_marks(tokenizer, sample, found.token_ids, found.sampled_mask, HEADERS.get(name))
            compared += 1
    assert compared


def test_calls_of_a_template_without_ends_of_turns_are_warned_of(caplog):
    messages, tools = TALKS["a call"]
    other = template_of("glm4moe") + "{# warnings are printed once for each template #}"
    learned(tokenizer_of("glm4moe", other), messages, tools)
    assert caplog.text.count("writes no end after an answer that is not the last") == 1


ROLES = ("system", "developer", "tool", "user")


@pytest.mark.parametrize("name", ["qwen2_5", "phi3", "llama3_1"])
def test_a_message_is_read_or_refused(name):
    """Templates pass over roles that they do not know."""
    tokenizer = tokenizer_of(name)
    for role in ROLES:
        talk = [user("Hi."), {"role": role, "content": "Be brief."}, assistant("No.")]
        word, sample = learned(tokenizer, talk, None)
        assert word == "no" or "Be brief." in marked(sample, tokenizer)
