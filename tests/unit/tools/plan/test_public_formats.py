"""The table of docs/supervised.md: its flags read rows of each public format, and learn what it says, as
`openrlhf data preview` shows. The rows have the formats' columns, with texts of our own."""

import json
import re
import shlex
from pathlib import Path

import datasets
import pytest
from PIL import Image

from openrlhf.data.prompts import build_prompts
from openrlhf.data.sources import load_rows
from openrlhf.rewards.math import grade_response
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import tiny_vision_model
from openrlhf.tools.plan.flags import data as main

ROOT = Path(__file__).parents[4]
TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL{{ c.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"name": "f", "arguments": '{"a": 1}'}
TOOL = {"name": "f", "description": "Adds.", "parameters": {"type": "object"}}
LISTED = 'TOOLS[{"type": "function", "function": ' + json.dumps(TOOL) + "}]<|end|>"
CALLED = 'CALL{"name": "f", "arguments": {"a": 1}}<|end|>'
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
TALK_TEXT = "<|user|>hi<|end|><|assistant|>⟦one<|end|>⟧"
PAIR = ["<|user|>hi<|end|><|assistant|>⟦{}<|end|>⟧", "<|user|>hi<|end|><|assistant|>⟦{}<|end|>⟧"]


def pair(chosen, rejected):
    return [PAIR[0].format(chosen), PAIR[1].format(rejected)]


def scored(chosen, rejected, prompt="<|user|>hi<|end|>"):
    """Texts of a reward model, which is read at the end of each."""
    return [f"{prompt}<|assistant|>{answer}⟦<|end|>⟧" for answer in (chosen, rejected)]


def said(sender, value, **more):
    return {"from": sender, "value": value, **more}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def calling(**form):
    return [
        turn("user", "hi"),
        turn("assistant", None, **form),
        turn("tool", "1", tool_call_id="a"),
        turn("assistant", "old", weight=0),
        turn("user", "go"),
        turn("assistant", "new", weight=1),
    ]


CALLS = {"tool_calls": [{"id": "a", "type": "function", "function": CALL}]}
TALKED = (
    f"{LISTED}<|user|>hi<|end|><|assistant|>⟦{CALLED}⟧<|tool|>1<|end|><|assistant|>old<|end|><|user|>go<|end|>"
    "<|assistant|>⟦new<|end|>⟧"
)
EARLIER = [
    message | ({"role": "function", "name": "f"} if message["role"] == "tool" else {})
    for message in calling(function_call=CALL)
]
HERMES = f"Call <tools>[{json.dumps({'type': 'function', 'function': TOOL})}]</tools>"
STEPS = "1+1\na ки\nb ки"
STEPPED = ["1+1\na к⟦и⟧(+)\nb к⟦и⟧(-)"]
"""The last token of the placeholder is read. The tokenizer has a token for each byte of ки, so the last one
completes the second letter."""


def rated(text, rating):
    return {"text": text, "rating": rating, "flagged": None}


FORMATS = {
    "OpenAI fine-tuning with `tools` and `weight`": (
        {
            "messages": calling(**CALLS),
            "tools": [{"type": "function", "function": TOOL}],
            "parallel_tool_calls": False,
        },
        [TALKED],
    ),
    "OpenAI with `functions` and `function_call`": ({"messages": EARLIER, "functions": [TOOL]}, [TALKED]),
    "ShareGPT": (
        {
            "id": "x",
            "conversations": [
                said("human", "hi"),
                said("gpt", "one"),
                said("human", "go"),
                said("gpt", "two"),
            ],
        },
        [TALK_TEXT + "<|user|>go<|end|><|assistant|>⟦two<|end|>⟧"],
    ),
    "ShareGPT with `system` and `tools` (LLaMA-Factory, APIGen-MT)": (
        {
            "conversations": [
                said("human", "hi"),
                said("function_call", json.dumps(CALL)),
                said("observation", "1"),
                said("gpt", "one"),
            ],
            "system": "sum",
            "tools": json.dumps([TOOL]),
        },
        [
            f"{LISTED}<|system|>sum<|end|><|user|>hi<|end|><|assistant|>⟦{CALLED}⟧<|tool|>1<|end|>"
            "<|assistant|>⟦one<|end|>⟧"
        ],
    ),
    "Hermes function calling": (
        {
            "conversations": [said("system", HERMES), said("human", "hi"), said("gpt", "one")],
            "tools": json.dumps([TOOL]),
        },
        [f"<|system|>{HERMES}<|end|>{TALK_TEXT}"],
    ),
    "xLAM": (
        {
            "id": 1,
            "query": "hi",
            "answers": json.dumps([{"name": "f", "arguments": {"a": 1}}]),
            "tools": json.dumps([TOOL]),
        },
        [f"{LISTED}<|user|>hi<|end|><|assistant|>⟦{CALLED}⟧"],
    ),
    "Alpaca": (
        [
            {"instruction": "sum", "input": "1+1", "output": "2", "text": "sum 1+1 2"},
            {"instruction": "say hi", "input": "", "output": "hi", "text": "say hi hi"},
        ],
        ["sum\n\n1+1⟦2<|end|>⟧", "say hi⟦hi<|end|>⟧"],
    ),
    "Dolly": (
        {"instruction": "sum", "context": "1+1", "response": "2", "category": "open_qa"},
        ["1+1\n\nsum⟦2<|end|>⟧"],
    ),
    "OpenOrca": (
        [
            {"id": "1", "system_prompt": "sum", "question": "hi", "response": "one"},
            {"id": "2", "system_prompt": "", "question": "hi", "response": "one"},
        ],
        [f"<|system|>sum<|end|>{TALK_TEXT}", TALK_TEXT],
    ),
    "FLAN": ({"inputs": "1+1", "targets": "2", "task": "sum"}, ["1+1⟦2<|end|>⟧"]),
    "Tulu 3, No Robots": ({"id": "1", "messages": TALK, "source": "x"}, [TALK_TEXT]),
    "WildChat": (
        {
            "conversation_hash": "x",
            "model": "m",
            "conversation": [m | {"language": "English", "redacted": False} for m in TALK],
        },
        [TALK_TEXT],
    ),
    "Magpie": ({"instruction": "hi", "response": "one", "conversations": [said("human", "hi")]}, [TALK_TEXT]),
    "Capybara": (
        {"source": "x", "conversation": [{"input": "hi", "output": "one"}, {"input": "go", "output": "two"}]},
        [TALK_TEXT + "<|user|>go<|end|><|assistant|>⟦two<|end|>⟧"],
    ),
    "LIMA": ({"conversations": ["hi", "one"], "source": "x"}, [TALK_TEXT]),
    "GSM8K": (
        {"question": "1+1=?", "answer": "It is <<1+1=2>>2.\n#### 2"},
        ["1+1=?⟦It is <<1+1=2>>2.\n#### 2<|end|>⟧"],
    ),
    "MATH, NuminaMath": (
        {
            "problem": "1/2?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"It is $\boxed{\frac{1}{2}}$.",
        },
        [r"1/2?⟦It is $\boxed{\frac{1}{2}}$.<|end|>⟧"],
    ),
    "OpenMathInstruct": (
        {"problem": "1+1", "generated_solution": r"\boxed{2}", "expected_answer": "2", "problem_source": "x"},
        [r"1+1⟦\boxed{2}<|end|>⟧"],
    ),
    "HH": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: one", "rejected": "\n\nHuman: hi\n\nAssistant: two"},
        ["\n⟦\nHuman: hi\n\nAssistant: one<|end|>⟧", "\n⟦\nHuman: hi\n\nAssistant: two<|end|>⟧"],
    ),
    "HH as messages": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: one", "rejected": "\n\nHuman: hi\n\nAssistant: two"},
        pair("one", "two"),
    ),
    "UltraFeedback binarized, DPO mix": (
        {
            "prompt": "hi",
            "messages": TALK,
            "chosen": TALK,
            "rejected": [TALK[0], turn("assistant", "two")],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        },
        pair("one", "two"),
    ),
    "UltraFeedback": (
        [
            {
                "instruction": "hi",
                "completions": [{"response": text, "overall_score": score} for text, score in answers],
                "models": ["a", "b", "c"],
            }
            for answers in ([("two", 3.0), ("one", 8.5), ("ok", 5.0)], [("one", 5.0), ("two", 5.0)])
        ],
        scored("one", "two"),
    ),
    "Nectar": (
        {
            "prompt": "\n\nHuman: hi\n\nAssistant: ",
            "answers": [
                {"answer": "ok", "rank": 2},
                {"answer": "two", "rank": 3},
                {"answer": "one", "rank": 1},
            ],
        },
        pair("one", "two"),
    ),
    "HelpSteer2 preferences": (
        [
            {"prompt": "hi", "response_1": one, "response_2": two, "preference_strength": strength}
            for one, two, strength in (("one", "two", -2), ("two", "one", 1), ("one", "two", 0))
        ],
        scored("one", "two") * 2,
    ),
    "HelpSteer3": (
        {
            "domain": "general",
            "context": [*TALK, turn("user", "go")],
            "response1": "two",
            "response2": "ok",
            "overall_preference": 3,
        },
        scored("ok", "two", "<|user|>hi<|end|><|assistant|>one<|end|><|user|>go<|end|>"),
    ),
    "SHP": (
        [
            {"history": "hi", "human_ref_A": "one", "human_ref_B": "two", "labels": 1, "score_ratio": 2.0},
            {"history": "hi", "human_ref_A": "two", "human_ref_B": "one", "labels": 0, "score_ratio": 2.0},
        ],
        scored("one", "two") * 2,
    ),
    "RewardBench": (
        {"prompt": "hi", "chosen": "one", "rejected": "two", "chosen_model": "a", "subset": "x", "id": 1},
        scored("one", "two"),
    ),
    "KTO": (
        [
            {"prompt": "hi", "completion": "one", "label": True},
            {"prompt": "go", "completion": "two", "label": False},
        ],
        [
            TALK_TEXT,
            "<|user|>hi<|end|><|assistant|>⟦two<|end|>⟧",
            "<|user|>go<|end|><|assistant|>⟦two<|end|>⟧",
            "<|user|>go<|end|><|assistant|>⟦one<|end|>⟧",
        ],
    ),
    "HelpSteer": (
        [
            {"prompt": asked, "response": answer, "helpfulness": score, "verbosity": 2}
            for asked, answer, score in (("hi", "one", 4), ("x", "ok", 3), ("go", "two", 1))
        ],
        [
            TALK_TEXT,
            "<|user|>hi<|end|><|assistant|>⟦two<|end|>⟧",
            "<|user|>go<|end|><|assistant|>⟦two<|end|>⟧",
            "<|user|>go<|end|><|assistant|>⟦one<|end|>⟧",
        ],
    ),
    "Math-Shepherd": ({"input": STEPS, "label": "1+1\na +\nb -", "task": "GSM8K"}, STEPPED),
    "TRL's steps: `completions` and `labels`": (
        {"prompt": "1+1", "completions": ["a", "b"], "labels": [True, False]},
        STEPPED,
    ),
    "PRM800K": (
        {
            "question": {"problem": "1+1", "ground_truth_answer": "2"},
            "label": {
                "steps": [
                    {
                        "completions": [rated("z", -1), rated("a", 1)],
                        "human_completion": None,
                        "chosen_completion": 1,
                    },
                    {"completions": [rated("b", -1)], "human_completion": None, "chosen_completion": None},
                    {"completions": [rated("c", 1)], "human_completion": None, "chosen_completion": 0},
                ],
                "finish_reason": "found_error",
            },
        },
        STEPPED,
    ),
}
"""First column of the table -> (a row or rows, texts of the preview)."""


def table():
    """Returns first column -> (command, flags) of the table in the docs."""
    text = (ROOT / "docs" / "supervised.md").read_text()
    lines = re.findall(
        r"^\| (.+?) \| `(.+?)` \|", text.partition("### Public formats")[2].partition("###")[0], re.M
    )
    short = "--data.input_key messages --data.apply_chat_template"
    found = {}
    for name, line in lines:
        command, *flags = shlex.split(line.replace(" M", f" {short}", 1))
        found[name] = (
            command,
            [flag.replace("rows.py:", f"{ROOT}/examples/python/rows.py:") for flag in flags],
        )
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)


@pytest.fixture
def preview(tmp_path, model, capsys):
    """Returns a function that shows rows, and returns the texts of the samples and what it printed."""

    def show(command, flags, rows, name="rows.jsonl", template=TEMPLATE, path=model):
        file = tmp_path / name
        if file.suffix == ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--model.model_name_or_path", str(path), "--data.dataset", str(file), *flags]
        words += ["--data.cache_dir", str(tmp_path / "cache"), "--no_color", "--samples", "9"]
        if template and command != "prm":
            words += ["--data.tokenizer_chat_template", template]
        main(["preview", command, *words])
        printed = capsys.readouterr()
        texts = re.findall(r"^--- .+\n((?s:.*?))\n\n(?=---|first step)", printed.out, re.M)
        return texts, printed.out, printed.err

    return show


def test_every_row_of_the_table_is_tested():
    assert [*table()] == [*FORMATS, "LLaVA"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_flags_of_the_table_learn_what_it_says(name, suffix, preview):
    command, flags = table()[name]
    rows, expected = FORMATS[name]
    texts, _, _ = preview(command, flags, rows if isinstance(rows, list) else [rows], f"rows.{suffix}")
    assert texts == expected


def test_rows_of_llava_learn_the_answer_at_the_image(preview, tmp_path):
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    asked = said("human", "<image>\nhi")
    row = {"id": "1", "image": "a.png", "conversations": [asked, said("gpt", "one")]}
    path = tiny_vision_model(tmp_path / "vision")
    command, flags = table()["LLaVA"]
    (text,), _, _ = preview(command, flags, [row], template=None, path=path)
    before, learned = text.split("<|assistant|>")
    assert before.startswith("<|user|><|vision_start|><|image_pad|>") and before.endswith("\nhi<|end|>")
    assert learned == "⟦one<|end|>⟧"


CHAT = ["--data.input_key", "messages", "--data.apply_chat_template"]
SHAREGPT = ["--data.input_key", "conversations", "--data.apply_chat_template"]
ALPACA = {"instruction": "sum", "input": "1+1", "output": "2", "text": "x"}
THOUGHTFUL = [TALK[0], TALK[1] | {"reasoning_content": "hm"}]
REFUSED = {
    "tools in the system message too": (
        SHAREGPT,
        FORMATS["Hermes function calling"][0],
        "--data.tools_key None",
    ),
    "thoughts that no template writes": (CHAT, {"messages": THOUGHTFUL}, "thoughts of message 2"),
    "half a weight": (CHAT, {"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}, "weight 0.5"),
    "a sender without a role": (SHAREGPT, {"conversations": [said("bing", "hi")]}, "message 1"),
    "pairs of texts": (SHAREGPT, {"conversations": ["hi", "one"]}, "message 1"),
    "Capybara's pairs": (SHAREGPT, {"conversations": [{"input": "hi", "output": "one"}]}, "message 1"),
    "texts of one message (OpenAssistant)": (
        ["--data.input_key", "text", "--data.apply_chat_template"],
        {"message_id": "1", "parent_id": None, "text": "hi", "role": "prompter"},
        "--data.output_key",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_teach_another_thing_are_refused(name, preview, capsys):
    flags, row, remedy = REFUSED[name]
    with pytest.raises(SystemExit):
        preview("sft", flags, [row])
    assert remedy in capsys.readouterr().err


def test_columns_that_no_flag_names_are_told(preview):
    flags = ["--data.input_key", "instruction", "--data.output_key", "output"]
    texts, _, told = preview("sft", flags, [ALPACA])
    assert texts == ["sum⟦2<|end|>⟧"] and told.count("that are not read: input, text\n") == 1


def test_an_answer_without_weight_alone_is_dropped_and_counted(preview):
    rows = [{"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"weight": 0}]}]
    texts, out, _ = preview("sft", CHAT, rows)
    assert texts == [TALK_TEXT] and "1 dropped" in out


FUNCTIONS = """
def tie(row):
    return None if row["input"] == "tie" else row

def broken(row):
    return {"input": row["inptu"]}

def text(row):
    return "x"

def lacking(row):
    return {"question": "x"}

number = 1
"""
OUTPUT = ["--data.output_key", "output"]


def test_a_row_function_leaves_rows_out(preview, tmp_path):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    rows = [{"input": "tie", "output": "1"}, {"input": "hi", "output": "one"}]
    texts, out, _ = preview("sft", [*OUTPUT, "--data.row_func", f"{tmp_path}/own.py:tie"], rows)
    assert texts == ["hi⟦one<|end|>⟧"] and "1 left out by --data.row_func" in out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "line 6: KeyError: 'inptu'"),
        ("text", "returned text, not a row"),
        ("lacking", "Its columns: question"),
        ("number", "a number, not a function"),
        ("missing", "has no missing. It has tie, broken, text, lacking"),
    ],
)
def test_a_row_function_that_cannot_be_used_is_told(function, message, preview, tmp_path, capsys):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    with pytest.raises(SystemExit):
        preview(
            "sft",
            [*OUTPUT, "--data.row_func", f"{tmp_path}/own.py:{function}"],
            [{"input": "hi", "output": "x"}],
        )
    assert message in capsys.readouterr().err


def test_a_changed_row_function_reads_the_rows_again(preview, tmp_path):
    file, rows = tmp_path / "own.py", [{"input": "hi", "output": "one"}]
    for text in ("go", "ok"):
        file.write_text(f"def own(row):\n    return row | {{'input': '{text}'}}\n")
        assert preview("sft", [*OUTPUT, "--data.row_func", f"{file}:own"], rows)[0] == [f"{text}⟦one<|end|>⟧"]


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("It is <<1+1=2>>2.\n#### 2", r"So \boxed{2}"),
        (r"Thus $x = \boxed{\frac{1}{\sqrt{2}}}$.", r"\boxed{\frac{\sqrt{2}}{2}}"),
        (r"\boxed{\left\{1, \{2\}\right\}}", r"\boxed{\left\{1, \{2\}\right\}}"),
    ],
)
def test_labels_of_gsm8k_and_math(label, response):
    assert grade_response(response, label) and not grade_response(r"\boxed{7}", label)


def test_rows_of_verl_have_the_label_of_an_object(tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": [turn("user", "1+1")],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": "1"},
    }
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(
        str(tmp_path / "rows.parquet"),
        flag="--data.prompt_dataset",
        required_columns={"--data.label_key": "label"},
        row_func=f"{ROOT}/examples/python/rows.py:verl",
    )
    options = {"apply_chat_template": True, "input_template": None, "max_len": 100}
    (prompt,) = build_prompts(rows, tiny_tokenizer(), input_key="input", label_key="label", **options)
    assert (prompt.text, prompt.label) == ("<|user|>1+1<|end|><|assistant|>", "2")
