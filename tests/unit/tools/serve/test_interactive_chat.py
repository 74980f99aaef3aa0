"""The loop around a conversation; the engines themselves are tested in tests/e2e/test_chat.py."""

import io
import sys

import pytest
from refusals import printed

from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.serve import interactive_chat
from openrlhf.tools.serve.flags import chat as chat_command

TOKENIZER = tiny_tokenizer()


class Engine:
    """Engine that says the same each time, and remembers its requests."""

    def __init__(self, text: str = "4 figs", interrupted_after: int | None = None) -> None:
        self.tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        self.interrupted_after = interrupted_after
        self.asked: list[str] = []
        self.seeds: list[int] = []
        self.closed = 0

    def stream(self, prompt, seed, params):
        self.asked.append(TOKENIZER.decode(prompt))
        self.seeds.append(seed)
        for i, token in enumerate(self.tokens):
            if i == self.interrupted_after:
                self.interrupted_after = None
                raise KeyboardInterrupt
            yield token

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_chat_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture
def chat(model, monkeypatch):
    def run(engine: Engine, lines: str, *flags: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        monkeypatch.setattr(interactive_chat, "_load", lambda *_: engine)
        flags = flags or ("--data.input_template", "User: {}\nAssistant: ")
        chat_command(["--model.model_name_or_path", model, "--data.max_len", "128", *flags])

    return run


def test_the_conversation_grows_until_it_is_cleared(chat, capsys):
    engine = Engine()
    chat(engine, "Hi\n\nMore?\nclear\nHi\nexit\nHi\n")
    first = "User: Hi\nAssistant: "
    assert engine.asked == [first, f"{first}4 figs\nUser: More?\nAssistant: ", first]
    assert engine.seeds[0] == engine.seeds[2] != engine.seeds[1]
    assert capsys.readouterr().out == "4 figs\n" * 3
    assert engine.closed == 1


def test_an_interrupted_answer_stays_in_the_conversation_as_far_as_it_was_shown(chat, capsys):
    engine = Engine(interrupted_after=1)
    chat(engine, "Hi\nMore?\n")
    shown = TOKENIZER.decode(engine.tokens[:1])
    assert engine.asked[1] == f"User: Hi\nAssistant: {shown}\nUser: More?\nAssistant: "
    assert capsys.readouterr().out == f"{shown} (stopped)\n4 figs\n"


def test_an_answer_cannot_act_on_the_terminal(chat, capsys):
    chat(Engine("\x1b[2J4"), "Hi\n")
    assert capsys.readouterr().out == "[2J4\n"


def test_a_conversation_that_is_too_long_is_not_sent(chat, capsys):
    engine = Engine()
    chat(engine, "many " * 200 + "\nHi\n")
    assert engine.asked == ["User: Hi\nAssistant: "]
    assert "--data.max_len 128" in capsys.readouterr().out


def test_prompts_ask_for_a_reward(chat):
    engine = Engine()
    chat(engine, "Hi\n", "--csft.enable", "--data.apply_chat_template")
    assert engine.asked == ["<|user|>Hi <rm_score>: 5.00 <|end|><|assistant|>"]


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ((), "<|user|>Hi<|end|><|assistant|>"),
        (("--data.apply_chat_template", "false"), "Hi"),
        (("--data.input_template", "Q: {} A:"), "Q: Hi A:"),
        (("--data.tokenizer_chat_template", "{{ messages[0].content }}!"), "Hi!"),
    ],
)
def test_the_chat_template_is_used_unless_a_flag_says_otherwise(chat, capsys, flags, asked):
    engine = Engine()
    chat(engine, "Hi\n", "--rollout.greedy", *flags)
    assert engine.asked == [asked]
    by_itself = not flags or flags[0] == "--data.tokenizer_chat_template"
    assert ("note: messages are in the chat template" in capsys.readouterr().err) == by_itself


def test_more_than_the_model_reads_is_refused(chat, capsys):
    with pytest.raises(SystemExit) as end:
        chat(Engine(), "Hi\n", "--data.max_len", "600")
    (refusal,) = printed(capsys.readouterr().err)
    assert end.value.code == 2 and refusal.code == ErrorCode.TOO_LONG
    assert refusal.place == "--data.max_len 600" and "--data.max_len 512" in refusal.text
