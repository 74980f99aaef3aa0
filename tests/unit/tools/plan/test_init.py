"""`openrlhf init`: recipes that the commands accept, for every number of GPUs and every kind of data."""

import io
import json
import sys
from pathlib import Path

import pytest
import refusals
import yaml

from openrlhf.config.fields import flag_values
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.command_line.run_files import command_and_flags
from openrlhf.tools.plan import init
from openrlhf.tools.plan.flags import check, invocation
from openrlhf.tools.plan.hardware import parse_cluster, this_machine
from openrlhf.tools.plan.init import ALGORITHMS, RECIPES, quoted, render

sys.path.append(str(Path(__file__).parents[4] / "tools"))
import named_algorithms

ROWS = {
    "sft": [{"messages": []}, {"question": "", "answer": ""}, {"instruction": "", "output": ""}],
    "dpo": [{"chosen": [], "rejected": []}, {"prompt": "", "chosen": "", "rejected": ""}],
    "rm": [{"chosen": [], "rejected": []}, {"prompt": "", "chosen": "", "rejected": ""}],
    "kto": [{"prompt": "", "completion": "", "label": True}],
    "rl": [{"problem": "", "answer": ""}, {"messages": [], "label": ""}],
    "rl_rm": [{"context_messages": []}, {"conversations": [{"from": "human", "value": "Hi"}]}],
}
ROLES = ("input", "output", "label", "prompt", "chosen", "rejected")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def flags(what: str, **more: object) -> list[str]:
    answers = {"what": what, "model": "org/model", "data": "org/data", "gpus": 8} | more
    answers |= {"reward": "org/reward"} if what == "rl_rm" else {}
    return [*(word for name, value in answers.items() for word in (f"--{name}", str(value))), "--yes"]


def read(what: str, gpus: int) -> dict:
    """Returns the flags of run.yaml, as the command understands them on so many GPUs."""
    cluster = parse_cluster(f"{max(1, gpus // 8)}x{min(gpus, 8)}xH100") if gpus else this_machine()
    command, words = command_and_flags([RECIPES[what].command, "run.yaml"], "openrlhf plan")
    return flag_values(invocation(command, words, cluster).config)


@pytest.mark.parametrize("gpus", [0, 1, 3, 7, 8, 24, 256])
@pytest.mark.parametrize("what", [name for name in RECIPES if name not in ALGORITHMS])
@pytest.mark.few(14)
def test_commands_accept_every_recipe(what: str, gpus: int) -> None:
    init.main(flags(what, gpus=gpus))
    values = read(what, gpus)
    is_rl = RECIPES[what].command == "ppo"
    assert values["ckpt.output_dir"] == f"ckpt/{what}"
    assert values["actor.model_name_or_path" if is_rl else "model.model_name_or_path"] == "org/model"
    if is_rl and gpus:
        ranks = values["actor.num_nodes"] * values["actor.num_gpus_per_node"]
        assert ranks == values["vllm.num_engines"] == gpus


def test_the_next_commands_can_be_copied_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    init.main([*flags("sft", gpus=2), "--file", "my run.yaml"])
    assert capsys.readouterr().out.count(" 'my run.yaml'") == 3


@pytest.mark.parametrize(("what", "row"), [(what, row) for what, rows in ROWS.items() for row in rows])
def test_columns_of_a_local_file(what: str, row: dict) -> None:
    Path("data.jsonl").write_text(json.dumps(row) + "\n")
    init.main(flags(what, data="data.jsonl"))
    values = read(what, 8)
    assert set(row) <= {values.get(f"data.{role}_key") for role in ROLES}
    assert "a guess" not in Path("run.yaml").read_text()


@pytest.mark.parametrize("what", ["sft", "kto", "rl"])
def test_a_chat_that_has_its_answer_takes_no_other(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "It is 4"}]
    row = {"messages": talk, "answer": "4", "label": True}
    Path("data.jsonl").write_text(json.dumps(row) + "\n")
    init.main(flags(what, data="data.jsonl"))
    values, text = read(what, 8), Path("run.yaml").read_text()
    assert values["data.input_key"] == "messages" and values.get("data.output_key") is None
    assert ("the policy would continue" in text) == (what == "rl")


def test_columns_that_are_unknown_are_marked() -> None:
    init.main(flags("rl"))
    assert "a guess" in Path("run.yaml").read_text()


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> refusals.Refusal:
    with pytest.raises(SystemExit):
        init.main(words)
    (found,) = refusals.printed(capsys.readouterr().err)
    return found


def test_an_existing_file_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("mine")
    found = refusal(flags("sft"), capsys)
    assert (found.code, found.place) == (ErrorCode.CONFLICT, "--file run.yaml")
    assert Path("run.yaml").read_text() == "mine"


def test_an_answer_without_a_default_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(["--what", "sft", "--model", "org/model", "--yes"], capsys)
    assert (found.code, found.place) == (ErrorCode.MISSING_FLAG, "--data")
    assert not Path("run.yaml").exists()


def test_a_recipe_that_the_command_refuses_is_not_kept() -> None:
    with pytest.raises(SystemExit):
        init.main(flags("rl", reward="missing/reward.py"))
    assert not Path("run.yaml").exists()


def test_a_refusal_leaves_no_reward_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither if the configuration cannot be written, nor if the command refuses it."""
    found = refusal([*flags("rl"), "--file", "missing/run.yaml"], capsys)
    assert (found.code, found.place) == (ErrorCode.NOT_WRITABLE, "--file missing/run.yaml")
    assert not list(Path().iterdir())
    monkeypatch.setattr(init, "parse", lambda command, argv: sys.exit(2))
    with pytest.raises(SystemExit):
        init.main(flags("rl"))
    assert not list(Path().iterdir())


def test_an_existing_reward_function_stays() -> None:
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): ...")
    init.main(flags("rl"))
    assert "..." in Path("reward.py").read_text()


@pytest.mark.parametrize(
    ("lines", "place", "code"),
    [
        ("grpoo", "--what grpoo", ErrorCode.INVALID_VALUE),
        ("sft\n./missing\norg/model", "--model ./missing", ErrorCode.NOT_FOUND),
        ("sft\norg/model\nmissing.jsonl\nx", "--data missing.jsonl", ErrorCode.NOT_FOUND),
        ("sft\norg/model", "--data", ErrorCode.MISSING_FLAG),
    ],
)
def test_a_wrong_line_of_a_pipe_ends_the_questions(
    lines: str,
    place: str,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines + "\n"))
    found = refusal([], capsys)
    assert (found.code, found.place) == (code, place)
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize(
    "algorithm", [a for a in named_algorithms.ALGORITHMS if "TIS" not in a.name], ids=lambda a: a.name
)
@pytest.mark.few(6)
def test_named_algorithms_are_those_of_the_documentation(
    algorithm: named_algorithms.Algorithm, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    init.main(flags(algorithm.name, gpus=gpus))
    assert "has no effect" not in "".join(capsys.readouterr())
    asked, values = dict(algorithm.settings), read("rl", gpus)
    if algorithm.overlong_buffer:
        asked["reward.overlong_buffer_len"] = 768 if gpus else 64
    assert {key: values[key] for key in asked} == asked


def test_sharegpt_rows_are_learned(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_chat_model(Path("model"), hidden_size=32, num_layers=1)
    talks = ([{"from": "human", "value": f"{n}+1"}, {"from": "gpt", "value": str(n + 1)}] for n in range(8))
    Path("rows.jsonl").write_text("".join(json.dumps({"conversations": talk}) + "\n" for talk in talks))
    init.main(flags("sft", model=model, data="rows.jsonl", gpus=0))
    with pytest.raises(SystemExit) as stop:
        check(["sft", "run.yaml", "--no_color"])
    text = capsys.readouterr().out
    assert stop.value.code == 0, text
    assert "0+1" in text and "⟦1" in text


@pytest.mark.parametrize("label", ["7", "3+4=<<3+4=7>>7\n#### 7"])
def test_the_reward_that_is_written_reads_answers_as_people_write_them(label: str) -> None:
    init.main(flags("rl"))
    space: dict = {}
    exec(Path("reward.py").read_text(), space)
    right = ["7", "7.0", "$7", r"\boxed{7}", "The answer is 7.", "So 3+4=7.<|im_end|>", "#### 7"]
    wrong = ["27", "-7", "0.7", "7,000", "", "I do not know.", r"7, no: \boxed{8}", "7 minus 2 is 5"]
    answers = right + wrong
    rewards = space["reward_func"]([f"p{a}" for a in answers], ["p"] * len(answers), [label] * len(answers))
    assert rewards["rewards"] == [1.0] * len(right) + [0.0] * len(wrong)


def test_questions_are_asked_without_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_text("no row\n")
    Path("bad.py").write_text("reward_func = 1 / 0\n")
    Path("full").mkdir()
    Path("full/model.safetensors").write_text("")
    answers = ["nonsense", "rl", ".", "./missing", "org/model", "bad.jsonl", "missing.jsonl", "org/data"]
    answers += ["missing/reward.py", "bad.py", "", "many", "9", "2", "full", "out"]
    typed = io.StringIO("\n".join(answers) + "\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    init.main([])
    shown = capsys.readouterr().out
    for flag, count in {"what": 1, "model": 2, "data": 2, "reward": 2, "gpus": 2, "output": 1}.items():
        assert shown.count(f"  --{flag} ") == count
    values = read("rl", 2)
    assert values["reward.remote_url"] == "reward.py" and values["vllm.num_engines"] == 2
    assert values["ckpt.output_dir"] == "out"


@pytest.mark.parametrize(
    "text", ["a: b", "#x", "yes", "1e5", "[1]", "a\nb: c", "\u00fc", "'", '"', "~", ".", "x y", "{{ gpus }}"]
)
def test_values_with_special_characters_stay_as_they_are(text: str) -> None:
    assert yaml.safe_load(f"key: {quoted(text)}") == {"key": text}
    content = yaml.safe_load(
        render(what="rl", model=text, data=text, reward=text, gpus=1, output=text, row={})
    )
    assert content["actor"]["model_name_or_path"] == content["ckpt"]["output_dir"] == text


def test_check_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_chat_model(Path("model"), hidden_size=32, num_layers=1)
    rows = ({"prompt": f"{n}+1=?", "answer": str(n + 1)} for n in range(64))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    init.main(flags("rl", model=model, data="rows.jsonl", gpus=0))
    with pytest.raises(SystemExit) as stop:
        check(["ppo", "run.yaml", "--no_color"])
    text = capsys.readouterr().out
    assert stop.value.code == 0, text
    assert text.endswith("nothing is wrong\n")
