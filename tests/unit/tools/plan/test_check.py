"""`openrlhf check`: a run that is right, and one in which much is wrong, all of it listed at once."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import refusals
from transformers import AutoTokenizer

from openrlhf.config.fields import flag_values
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.command_line import installation
from openrlhf.tools.command_line.installation import mismatches, requirements
from openrlhf.tools.command_line.run_files import command_and_flags
from openrlhf.tools.plan import check
from openrlhf.tools.plan.estimate import Assumed
from openrlhf.tools.plan.flags import check as check_command
from openrlhf.tools.plan.flags import invocation
from openrlhf.tools.plan.hardware import cores
from openrlhf.tools.plan.preview import Preview

REWARD = """\
from openrlhf.utils import grade_response
def reward_func(queries, prompts, labels):
    return {'rewards': [%s for q, p, l in zip(queries, prompts, labels)]}
"""
RIGHT = "float(grade_response(q.removeprefix(p), l))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)


@pytest.fixture
def words(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    rows = ({"input": f"{n}+1=?", "answer": str(n + 1)} for n in range(10))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text(REWARD % RIGHT)
    flags = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": "rows.jsonl",
        "data.label_key": "answer",
        "data.apply_chat_template": "true",
        "data.max_len": 64,
        "reward.remote_url": "reward.py",
        "algo.advantage.estimator": "group_norm",
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 8,
        "ckpt.output_dir": "ckpt",
    }
    return ["ppo", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]


def checked(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as stop:
        check_command(words)
    return stop.value.code, capsys.readouterr().out


def test_a_run_that_is_right(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked(words, capsys)
    assert code == 0, text
    assert text.endswith("nothing is wrong\n")
    titles = re.findall("\n\n([a-z ]+)", f"\n{text}")
    assert titles[:-2] == [
        "versions",
        "files and models",
        "prompts",
        "stop tokens",
        "chat template",
        "rewards",
        "disks",
        "ports",
    ]
    assert "--- sample 1: " in text and "0+1=?" in text
    assert "  right        1        'The answer is 1.'\n" in text
    assert "  right, boxed 1        '\\\\boxed{1}'\n" in text
    assert "  right, alone 1        '1'\n" in text
    assert "  wrong        0        'The answer is 11.'\n" in text
    assert "  empty        0        ''\n" in text
    assert "step: 4 prompts x 2 samples = 8 samples" in text


def test_each_check_is_asked_about_its_own_flag(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that has a problem already is not checked again."""
    command, flags = command_and_flags([*words, "--eval.dataset", "rows.jsonl"], "check")
    config = invocation(command, flags, cores(1)).config
    run = check.Check(command, config, Preview(io.StringIO(), coloured=False), Assumed())
    asked: list[str] = []
    monkeypatch.setattr(run, "ask", lambda flag, check, /, *_, **__: asked.append(flag))
    check._files(run)
    assert asked[:3] == ["--ckpt.output_dir", "--logger.trackers", "--train.hooks"]
    known = {f"--{key}" for key in flag_values(config)}
    assert len(asked) > 5 and set(asked) <= known


def verdict(text: str) -> list[str]:
    """Returns the last lines of a check without problems, each note as one line."""
    start, _, notes = text.rpartition("\nthe run can start, but:\n")
    return [line.strip() for line in notes.splitlines()] if start else []


@pytest.mark.processes
def test_a_template_that_is_not_used_is_named_first(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    at = words.index("--data.apply_chat_template")
    without = words[:at] + words[at + 2 :]
    code, text = checked(without, capsys)
    assert code == 0
    assert verdict(text)[0].startswith("the model's chat template is not used: ")
    assert "--data.apply_chat_template" in verdict(text)[0]
    assert checked([*without, "--data.input_template", "{}"], capsys)[1].endswith("nothing is wrong\n")


@pytest.mark.processes
def test_prompts_that_have_the_form_of_the_template(
    words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = words.index("--data.apply_chat_template")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "1+1=?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    Path("rows.jsonl").write_text(json.dumps({"input": text, "answer": "2"}) * 1 + "\n")
    few = ["--rollout.batch_size", "1", "--train.batch_size", "2"]
    assert checked([*words[:at], *words[at + 2 :], *few], capsys)[1].endswith("nothing is wrong\n")


@pytest.mark.processes
def test_what_so_few_rows_give(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    Path("rows.csv").write_text(
        "input,answer\n" + "".join("{input},{answer}\n".format(**row) for row in lines)
    )
    few = "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024"
    few += " --data.prompt_dataset rows.csv --train.max_steps 12 --eval.dataset rows.jsonl"
    code, text = checked([*words, *few.split()], capsys)
    assert code == 0
    assert verdict(text) == [
        "every step has all 10 prompts, fewer than --rollout.batch_size 128: 80 samples",
        "--train.max_steps 12 is not reached: with --train.num_episodes 1 prompts are used up after step 1",
        "10 of 10 prompts of --eval.dataset are trained on: no held-out scores",
        "--eval.dataset rows.jsonl: is not used, because eval.steps is -1; set --eval.steps N",
    ]
    assert "step: 10 prompts x 8 samples = 80 samples; 1 optimizer step of 80 samples" in text
    assert "run: 10 rows, 1 step, " in text


@pytest.mark.processes
def test_a_learning_rate_that_destroys_models(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked([*words, "--actor.adam.lr", "0.5"], capsys)
    (note,) = verdict(text)
    assert code == 0 and note.startswith("--actor.adam.lr 0.5: is 500,000 times the default 1e-06")


def test_a_right_answer_that_is_longer_than_answers_may_be(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input": f"{n}+1=?", "answer": "one two three four five six"} for n in range(10)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = checked([*words, "--rollout.max_new_tokens", "4"], capsys)[1]
    assert verdict(text)[0].endswith("tokens, more than --rollout.max_new_tokens 4")


def test_a_reward_that_never_differs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(REWARD % "0.0")
    assert verdict(checked(words, capsys)[1])[0].startswith("all answers have the same reward")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reward", "label", "told"),
    [
        ("float(l in q.removeprefix(p))", "7", "no right answer has a larger reward (1) than a wrong one"),
        ("float(l in q.removeprefix(p))", "3+4=7\n#### 7", "all answers have the same reward"),
        ("float(q.removeprefix(p) == l)", "7", "all answers have the same reward"),  # a stop token follows
        (RIGHT, "3+4=7\n#### 7", None),
        (RIGHT, "1,000", None),
        (RIGHT, "Paris", None),
        ("float('boxed{7}' in q)", "7", None),
    ],
)
def test_rewards_meet_answers_of_a_model(
    words: list[str], capsys: pytest.CaptureFixture[str], reward: str, label: str, told: str | None
) -> None:
    Path("reward.py").write_text(REWARD % reward)
    rows = [{"input": f"{n}?", "answer": label} for n in range(10)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = verdict(checked(words, capsys)[1])
    assert [note.startswith(told) for note in notes] == [True] if told else not notes


@pytest.mark.processes
def test_a_question_that_is_taken_for_an_answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(REWARD % "float(l in q.removeprefix(p) and '1' + l not in q)")
    rows = [{"input": f"Is {n} + 3 equal to 7 or {n}8?", "answer": "7"} for n in range(2, 12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = checked(words, capsys)[1]
    assert "  copied       1        'Is 2 + 3 equal to 7 or 28?'\n" in text
    assert verdict(text)[0].startswith("an answer that only repeats the question has the reward 1")


@pytest.mark.processes
def test_the_plan_has_the_lengths_of_the_rows(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = checked(words, capsys)[1]
    lengths = [int(n) for n in re.findall(r"sample \d+: (\d+) tokens", text)]
    mean = int(re.search(r"tokens of a sample: prompt (\d+) \+ response \d+ \(assumed\)", text)[1])
    assert min(lengths) <= mean <= max(lengths)
    assert "prompt 33 + response" in checked([*words, "--prompt_tokens", "33"], capsys)[1]


def test_all_problems_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(REWARD % "1 / 0")
    Path("file").write_text("")
    code, text = checked([*words, "--logger.run_dir", "file/run", "--data.label_key", "solution"], capsys)
    assert code == 1
    found = refusals.printed(text)
    assert {refusal.code for refusal in found} >= {ErrorCode.NOT_WRITABLE, ErrorCode.MISSING_COLUMN}
    listed = text.partition(" problems:\n")
    assert len(refusals.printed(listed[2])) == int(listed[0].rpartition("\n")[2])


def test_a_reward_function_that_fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(REWARD % "1 / 0")
    code, text = checked(words, capsys)
    assert code == 1
    assert [refusal.code for refusal in refusals.printed(text)] == [ErrorCode.USER_CODE]
    parts, _, problems = text.partition("\none problem:\n")
    assert "ZeroDivisionError" in problems and "ZeroDivisionError" not in parts
    assert "rewards\n  wrong, see the end: --reward.remote_url\n" in parts


@pytest.mark.processes
def test_a_task_is_tried_with_its_own_reward(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text(REWARD % "0.0")
    Path("own.py").write_text(REWARD % RIGHT)
    rows = [{"input": f"{n}?", "answer": "7", "datasource": source} for n in range(5) for source in "ab"]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = checked([*words, "--tasks.a.reward", "own.py"], capsys)
    of_others, of_a = text.partition("rewards of other prompts")[2].split("rewards of a\n")
    assert code == 0 and "right        0 " in of_others and of_a.startswith("  right        1 ")
    (note,) = verdict(text)
    assert note.startswith("--reward.remote_url: all answers have the same reward")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reward", "remark"),
    [
        (RIGHT, None),
        (
            "float(q == queries[0])",
            "[1.0, 0.0, 0.0, 0.0, 0.0, 0.0] in one order and [0.0, 0.0, 0.0, 0.0, 0.0, 1.0] in the",
        ),
        (
            "float(next(numbers))",
            "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0] in a first call and [6.0, 7.0, 8.0, 9.0, 10.0, 11.0] in a",
        ),
    ],
    ids=["by answer", "by place", "by call"],
)
def test_rewards_that_depend_on_the_order_of_a_batch(
    words: list[str], capsys: pytest.CaptureFixture[str], reward: str, remark: str | None
) -> None:
    Path("reward.py").write_text("from itertools import count\nnumbers = count()\n" + REWARD % reward)
    for batch in ("1", "8"):
        code, text = checked([*words, "--reward.batch", batch], capsys)
        assert code == 0, text
        is_told = "note: the same answers got the rewards" in text
        assert is_told == (remark is not None and batch == "8"), text
    assert remark is None or remark in " ".join(text.split())


@pytest.mark.processes
def test_a_template_whose_answers_never_end(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}{{ m.content }} + {% endfor %}"
    code, text = checked([*words, "--data.tokenizer_chat_template", template], capsys)
    assert code == 1
    assert ErrorCode.CHAT_TEMPLATE in {refusal.code for refusal in refusals.printed(text)}


def test_a_supervised_run(model: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"sft --model.model_name_or_path {model} --data.dataset rows.jsonl --data.output_key answer"
    flags += " --data.apply_chat_template --data.max_len 64 --train.batch_size 4 --ckpt.output_dir ckpt"
    code, text = checked([*flags.split(), "--no_color"], capsys)
    assert code == 0, text
    assert "--- sample 1: " in text and "⟦" in text
    assert re.search(r"tokens of a sequence: \d+\n", text)
    flags += " --eval.dataset rows.jsonl --train.max_steps 7"
    assert verdict(checked(flags.split(), capsys)[1]) == [
        "--train.max_steps 7 is not reached: with --train.max_epochs 2 the data is used up after step 6",
        "--eval.dataset rows.jsonl is trained on: no held-out scores",
    ]


@pytest.mark.parametrize(("answer", "noted"), [("2<|end|>\n", False), ("2<|end|> so", True)])
def test_answers_that_go_on_behind_a_stop_token(model, words, capsys, answer: str, noted: bool) -> None:
    rows = [{"input": "1+1=?", "answer": "2"}, {"input": "1+1=?", "answer": answer}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"sft --model.model_name_or_path {model} --data.dataset rows.jsonl --data.output_key answer"
    _, text = checked([*flags.split(), "--data.apply_chat_template", "--ckpt.output_dir", "out"], capsys)
    told = [
        line
        for line in verdict(text)
        if line.startswith("1 of the first 2 samples, such as 2, learn text behind")
    ]
    assert bool(told) is noted, text


def test_packages_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"torch", "transformers", "ray", "rich"} <= {requirement.name for requirement in requirements()}
    assert not [*mismatches()]
    monkeypatch.setattr(installation, "installed_version", {"torch": "1.0"}.get)
    found = {problem.value: problem for problem in mismatches()}
    assert "1.0" in found["torch"].text and "not installed" in found["ray"].text and "vllm" not in found
