import io
import json
import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from refusals import printed

from openrlhf.errors import ErrorCode
from openrlhf.rows import Pair, Sample, Steps, UnpairedExample
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import IMAGE_TOKEN, tiny_vision_tokenizer
from openrlhf.tools.plan.flags import USAGE
from openrlhf.tools.plan.flags import data as main
from openrlhf.tools.plan.preview import (
    Preview,
    coloured_text,
    histogram,
    list_sequences,
    plain_text,
    split_spans,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def sample(tokenizer, *texts):
    """Returns a sample of texts that are in turn only read and learned."""
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    learned = [i % 2 == 1 for i, ids in enumerate(pieces) for _ in ids]
    return Sample(token_ids=torch.tensor([*chain.from_iterable(pieces)]), action_mask=torch.tensor(learned))


def plain(item, tokenizer):
    return [(sequence.title, plain_text(sequence)) for sequence in list_sequences(item, tokenizer)]


def test_golden_output_of_sft(tmp_path, model, capsys):
    rows = [{"input": f"{n}+1", "output": "hi " * n} for n in range(1, 7)]
    rows += [{"input": "9+9", "output": ""}, {"input": "1", "output": "2 " * 60}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--model.model_name_or_path {model} --data.dataset {path} --data.output_key output"
    flags += " --data.apply_chat_template --data.max_len 30 --train.micro_batch_size 3 --train.batch_size 6"
    main(["preview", "sft", *flags.split(), "--samples", "2"])
    assert capsys.readouterr().out == GOLDEN


GOLDEN = """\
--- sample 1: 10 tokens, 4 learned
<|user|>1+1<|end|><|assistant|>⟦hi <|end|>⟧

--- sample 2: 13 tokens, 7 learned
<|user|>2+1<|end|><|assistant|>⟦hi hi <|end|>⟧

first step: 6 samples in 2 packed rows
  row 1: 3 samples, 65 tokens, 49 learned
  row 2: 3 samples, 54 tokens, 36 learned

8 rows: 7 samples, 1 dropped, 1 cut at max_len
    1 nothing to learn (empty prompt or answer)
    --data.max_len 125 would keep every row whole
135 tokens, 95 learned (70.4%)

tokens of a sample: mean 19.3, median 19, 90% 30, 99% 30, longest 30
            10-12 ████████████████████████████████████████ 1
            13-15 ████████████████████████████████████████ 1
            16-18 ████████████████████████████████████████ 1
            19-21 ████████████████████████████████████████ 1
            22-24 ████████████████████████████████████████ 1
            25-27 ████████████████████████████████████████ 1
            28-30 ████████████████████████████████████████ 1
"""


TALK = [{"role": "user", "content": "1+1"}]
PAIR = {"prompt": TALK, "chosen": "2", "rejected": "3"}
COMMANDS = {
    "rm": (
        PAIR,
        "--data.apply_chat_template --data.prompt_key prompt",
        "--- pair 1: chosen, 8 tokens, 1 learned\n<|user|>1+1<|end|><|assistant|>2⟦<|end|>⟧\n\n"
        "--- pair 1: rejected, 8 tokens, 1 learned\n<|user|>1+1<|end|><|assistant|>3⟦<|end|>⟧\n",
    ),
    "dpo": (
        PAIR,
        "--data.apply_chat_template --data.prompt_key prompt",
        "--- pair 1: chosen, 8 tokens, 2 learned\n<|user|>1+1<|end|><|assistant|>⟦2<|end|>⟧\n\n"
        "--- pair 1: rejected, 8 tokens, 2 learned\n<|user|>1+1<|end|><|assistant|>⟦3<|end|>⟧\n",
    ),
    "kto": (
        {"input": "1+1", "output": "2", "label": True},
        "--data.output_key output --data.input_template {}=",
        "--- answer 1: good, 6 tokens, 2 learned\n1+1=⟦2<|end|>⟧\n\n--- answer 1: mismatched answer, ",
    ),
    "prm": (
        {"input": "1+1=2<|end|>2+2=5<|end|>", "label": ["+", "-"]},
        "--data.placeholder_token <|end|> --data.reward_tokens + -",
        "--- solution 1: 12 tokens, 2 learned\n1+1=2⟦<|end|>⟧(+)2+2=5⟦<|end|>⟧(-)\n",
    ),
    "kd": (
        {"input": "1+1", "output": "2"},
        "--data.input_template {}= --teacher.model_name_or_path {model}",
        "--- sample 1: 6 tokens, 2 learned\n1+1=⟦2<|end|>⟧\n",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_supervised_command_has_a_preview(tmp_path, model, capsys, name):
    row, flags, shown = COMMANDS[name]
    other = row | {"input": "2+2", "output": "7"} if "output" in row else row
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(other) + "\n")
    flags = f"--model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl {flags}"
    main(["preview", name, *flags.replace("{model}", str(model)).split()])
    out = capsys.readouterr().out
    assert out.startswith(shown)
    assert "2 rows: 2 " in out


def test_the_parts_together_are_what_the_tokenizer_makes_of_the_whole(tokenizer):
    texts = ("<|user|>1 + 2<|end|><|assistant|>", " é😀 and", " then\n", "the end<|end|>")
    item = sample(tokenizer, *texts)
    spans = list(split_spans(item, tokenizer))
    assert "".join(span.text for span in spans) == "".join(texts)
    assert "".join(span.text for span in spans if span.learned) == texts[1] + texts[3]
    assert [s.text for s in spans if s.special] == ["<|user|>", "<|end|><|assistant|>", "<|end|>"]


def test_learned_tokens_are_marked_and_keep_their_spaces(tokenizer):
    item = sample(tokenizer, "<|user|>1+2<|assistant|>", " 3 <|end|>", "\n<|user|>so", " 4")
    assert plain(item, tokenizer) == [("", "<|user|>1+2<|assistant|>⟦ 3 <|end|>⟧\n<|user|>so⟦ 4⟧")]


def test_the_tokens_of_an_image_are_counted():
    tokenizer = tiny_vision_tokenizer()
    image = f"<|vision_start|>{IMAGE_TOKEN * 300}<|vision_end|>"
    item = sample(tokenizer, f"<|user|>{image}A{IMAGE_TOKEN * 3}<|assistant|>", "red")
    shown = f"<|user|><|vision_start|>{IMAGE_TOKEN}×300<|vision_end|>A{IMAGE_TOKEN * 3}<|assistant|>"
    assert plain(item, tokenizer) == [("", f"{shown}⟦red⟧")]
    assert coloured_text(list_sequences(item, tokenizer)[0]).plain == f"{shown}red"


def test_both_sides_of_a_pair(tokenizer):
    pair = Pair(chosen=sample(tokenizer, "1+1=", "2"), rejected=sample(tokenizer, "1+1=", "3"), margin=0.5)
    assert plain(pair, tokenizer) == [("chosen, better by 0.5", "1+1=⟦2⟧"), ("rejected", "1+1=⟦3⟧")]


def test_an_unpaired_answer_and_the_mismatched_one(tokenizer):
    example = UnpairedExample(
        sample=sample(tokenizer, "1+1=", "3"), mismatched=sample(tokenizer, "1+1=", "7"), desirable=False
    )
    assert plain(example, tokenizer) == [
        ("bad", "1+1=⟦3⟧"),
        ("mismatched answer, for the KL estimate", "1+1=⟦7⟧"),
    ]


def test_labels_stand_at_their_steps(tokenizer):
    solution = sample(tokenizer, "1+1=2", "<|end|>", "2+2=5", "<|end|><|end|>")
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(["+", "-", "+"]))
    assert plain(Steps(sample=solution, labels=ids), tokenizer) == [
        ("", "1+1=2⟦<|end|>⟧(+)2+2=5⟦<|end|>⟧(-)⟦<|end|>⟧(+)")
    ]
    soft = Steps(sample=solution, labels=torch.tensor([1.0, 0.25, 0.5]))
    assert plain(soft, tokenizer) == [("", "1+1=2⟦<|end|>⟧(1)2+2=5⟦<|end|>⟧(0.25)⟦<|end|>⟧(0.5)")]


def test_text_cannot_act_on_the_terminal(tokenizer):
    (sequence,) = list_sequences(sample(tokenizer, "a\x1b[2J", "b\x9b"), tokenizer)
    assert plain_text(sequence) == "a[2J⟦b⟧"
    assert coloured_text(sequence).plain == "a[2Jb"


def test_colours_say_what_is_learned(tokenizer):
    (sequence,) = list_sequences(sample(tokenizer, "1+1=", "2<|end|>"), tokenizer)
    text = coloured_text(sequence)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("1+1=", "dim"),
        ("2", "green"),
        ("<|end|>", "green reverse"),
    ]


def test_a_terminal_shows_the_sides_of_a_pair_next_to_each_other(tokenizer):
    stream = io.StringIO()
    pair = Pair(chosen=sample(tokenizer, "1+1=", "2"), rejected=sample(tokenizer, "1+1=", "3"))
    Preview(stream, coloured=True).item(1, pair, tokenizer)
    assert "\x1b[32m2" in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert any("chosen" in line and "rejected" in line for line in lines)
    assert any(line.count("1+1=") == 2 for line in lines)


def test_the_histogram_has_every_length_in_one_bin():
    lengths = np.array([3, 3, 4, 9, 17, 18])
    assert histogram(lengths, bins=4) == [(3, 6, 3), (7, 10, 1), (11, 14, 0), (15, 18, 2)]
    assert histogram(np.array([5, 5])) == [(5, 5, 2)]
    assert sum(count for _, _, count in histogram(np.arange(1, 1000))) == 999


class Items(list):
    """Dataset of a list."""

    @property
    def lengths(self):
        return [item.length for item in self]


def test_the_summary_counts_by_hand(tokenizer):
    stream = io.StringIO()
    dataset = Items([sample(tokenizer, "123", "4"), sample(tokenizer, "12", "3456")])
    dataset.truncated, dataset.skipped, dataset.needed_len = 0, Counter({"bad row": 2}), 9
    Preview(stream, coloured=False).summary(dataset)
    counts, bad, remedy = stream.getvalue().splitlines()[:3]
    assert re.findall(r"\d+", counts) == ["4", "2", "2", "0"] and bad.split() == ["2", "bad", "row"]
    assert "--data.max_len 9 " in remedy
    assert "10 tokens, 5 learned (50.0%)" in stream.getvalue()
    assert "mean 5.0, median 4, 90% 6, 99% 6, longest 6" in stream.getvalue()


LONG = {
    "sft": ("--data.output_key output", {"output": "1 2 3 4 5 6 7 8 9"}),
    "kto": ("--data.output_key output", {"output": "1 2 3 4 5 6 7 8 9", "label": False}),
    "rm": ("--data.prompt_key input", {"chosen": "2 3 4 5 6 7 8 9", "rejected": "2 3 4 5 6 7 8 1"}),
    "dpo": ("--data.prompt_key input", {"chosen": "2 3 4 5 6 7 8 9", "rejected": "2 3 4 5 6 7 8 1"}),
    "prm": ("--data.placeholder_token <|end|>", {"input": "1 2 3 4 5 6 7 8 9<|end|>", "label": ["+"]}),
}


@pytest.mark.parametrize("name", LONG)
def test_rows_that_max_len_cuts_are_told_also_from_the_cache(tmp_path, model, capsys, caplog, name):
    """With the suggested value no row is cut or dropped for its length."""
    flags, long = LONG[name]
    short = {"input": "1+1", "output": "2", "chosen": "2", "rejected": "3", "label": True}
    if name == "prm":
        short = {"input": "1<|end|>", "label": ["+"]}
    rows = [short | {"input": f"{n}{short['input']}"} for n in range(5)] + [short | long, short | long]
    rows[-1] = rows[-1] | {"input": "7 8 9 7 8 9 7 8 9 " + rows[-1]["input"]}  # a prompt that leaves no room
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = f"preview {name} --model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl {flags}"
    told = []
    for _ in range(2):
        caplog.clear()
        main([*argv.split(), "--data.max_len", "14"])
        told.append("\n".join(caplog.messages))
    found = re.search(r"--data.dataset: of 7 rows .*--data.max_len (\d+) ", told[1], re.S)
    assert told[0] == told[1] and found, told
    assert f"--data.max_len {found[1]} " in capsys.readouterr().out
    caplog.clear()
    main([*argv.split(), "--data.max_len", found[1]])
    assert "0 dropped, 0 cut" in capsys.readouterr().out
    assert not caplog.text


@pytest.mark.parametrize(
    ("argv", "code", "place"),
    [
        (["preview", "ppo"], ErrorCode.UNKNOWN_FLAG, "openrlhf data preview 'ppo'"),
        (["show"], ErrorCode.UNKNOWN_FLAG, "openrlhf data 'show'"),
        (["preview", "sft", "--samples", "many"], ErrorCode.INVALID_VALUE, "--samples"),
        (["preview", "sft", "--samples"], ErrorCode.INVALID_VALUE, "--samples"),
        (["preview", "sft"], ErrorCode.MISSING_FLAG, "--data.dataset"),
    ],
)
def test_a_wrong_command_line_is_refused(argv, code, place, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert (code, place) in [refusal[:2] for refusal in printed(capsys.readouterr().err)]


def test_usage_and_the_help_of_the_command(capsys):
    main(["--help"])
    assert capsys.readouterr().out == USAGE + "\n"
    with pytest.raises(SystemExit):
        main(["preview", "dpo", "--help", "beta"])
    assert "--model.beta" in capsys.readouterr().out
