"""Problems of reasoning-gym as prompts, and their verifier as the reward, with the real package."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from refusals import printed, refused

from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import EvalConfig, PPOConfig, PromptDataConfig, RewardConfig
from openrlhf.config.reasoning_gym import GYM_VERIFIER, parse_gym
from openrlhf.data import reasoning_gym
from openrlhf.data.outline import first_row
from openrlhf.data.prompts import build_prompts
from openrlhf.data.reasoning_gym import NOT_REPEATABLE, find_entry, gym_dataset, gym_rows
from openrlhf.data.sources import check_columns, load_rows, rows_digest
from openrlhf.errors import ErrorCode
from openrlhf.rewards.function import RewardFunction, check_reward_file
from openrlhf.tasks.reasoning_gym_reward import extract_answer, reward_func
from openrlhf.tasks.tiny_model import tiny_tokenizer

FLAG = "--data.prompt_dataset"
LEGS = "reasoning_gym:leg_counting?size=5&seed=7&max_animals=4"
CHAIN = "reasoning_gym:chain_sum?size=3&seed=1"


def load(spec, **options):
    return load_rows(spec, flag=FLAG, required_columns={"--data.input_key": "input"}, **options)


def test_rows_are_those_of_the_package():
    dataset = gym_dataset(LEGS, FLAG)
    rows = list(load(LEGS))
    assert [row["input"] for row in rows] == [dataset[i]["question"] for i in range(5)]
    assert all(row["label"].startswith(f"{LEGS}#{i}#") for i, row in enumerate(rows))
    assert {row["datasource"] for row in rows} == {"leg_counting"}
    assert max(find_entry(row["label"])[1]["metadata"]["num_animals"] for row in rows) <= 4


def test_rows_depend_on_the_seed_alone():
    first, again = (list(load(LEGS)) for _ in range(2))
    other = list(load(LEGS.replace("seed=7", "seed=70")))
    assert first == again
    assert not {row["input"] for row in first} & {row["input"] for row in other}


def test_a_comma_list_mixes_them_with_files(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"input": "1+1?", "label": "2", "datasource": "own"}) + "\n")
    rows = load(f"{LEGS},{path},{CHAIN}")
    assert [row["datasource"] for row in rows] == ["leg_counting"] * 5 + ["own"] + ["chain_sum"] * 3
    assert rows.origin(8) == f"{CHAIN}:3"
    assert len(load(LEGS, max_samples=2)) == 2


@pytest.mark.processes
def test_rows_become_prompts_with_a_source(tmp_path):
    rows = load(CHAIN)
    prompts = build_prompts(
        rows,
        tiny_tokenizer(),
        input_key="input",
        label_key="label",
        apply_chat_template=True,
        input_template=None,
        max_len=512,
    )
    assert [(p.label, p.source) for p in prompts] == [(row["label"], "chain_sum") for row in rows]


def test_the_first_row_has_the_columns_of_a_gym():
    assert first_row(LEGS, flag=FLAG) == {"input": "", "label": "", "datasource": ""}


def test_the_digest_of_rows_follows_the_specification():
    digests = [rows_digest(spec, flag=FLAG) for spec in (LEGS, LEGS, CHAIN, f"{LEGS},{CHAIN}")]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.processes
def test_the_verifier_in_a_process_of_its_own():
    """The entry's own answer is right in every form, another one is wrong."""
    check_reward_file(GYM_VERIFIER, "--reward.remote_url")
    function = RewardFunction(GYM_VERIFIER, timeout=60, batch_size=8)
    rows = list(load(f"{LEGS},{CHAIN}"))
    forms = "<think>7?</think><answer>{}</answer><|end|>", "So \\boxed{{{}}}.</s>", "Hm.\n{}\n<|im_end|>\n"

    async def ask():
        right = [
            function(
                f"Q: {row['input']}{form.format(find_entry(row['label'])[1]['answer'])}", "Q: ", row["label"]
            )
            for row in rows
            for form in forms
        ]
        wrong = [function(f"Q<answer>-12345</answer>{row['input']}", "Q", row["label"]) for row in rows]
        return await asyncio.gather(*right), await asyncio.gather(*wrong)

    right, wrong = asyncio.run(ask())
    function.close()
    assert [(r.reward, r.score) for r in right] == [(1.0, 1.0)] * 24
    assert [r.extra_logs["answer_marked"] for r in right] == [1.0, 1.0, 0.0] * 8
    assert all(r.reward < 1 for r in wrong) and len(wrong) == 8


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", ("2", True)),
        ("<answer>\\boxed{3}</answer>", ("\\boxed{3}", True)),
        ("\\boxed{1} or \\boxed{2}<|endoftext|>", ("2", True)),
        ("<think><answer>1</answer></think>42<|im_end|>", ("42", False)),
        ("first\n\nsecond line \n\n<|end|>\n", ("second line", False)),
        ("12</s>", ("12", False)),
        ("12<eos><pad><pad>", ("12", False)),
        ("12<｜end▁of▁sentence｜>", ("12", False)),
        ("a < b", ("a < b", False)),
        ("x <b>", ("x <b>", False)),
        ("<|end|>", (None, False)),
        ("", (None, False)),
    ],
)
def test_the_answer_of_a_response(response, expected):
    assert extract_answer(response) == expected


def test_what_the_verifier_raises_is_no_reward():
    (label,) = (row["label"] for row in gym_rows("reasoning_gym:prime_factorization?size=1", FLAG))
    with pytest.raises(ValueError, match="invalid literal"):
        reward_func(["p<answer>I do not know</answer>"], ["p"], [label])


def test_a_label_of_another_problem_is_an_error():
    label = next(gym_rows(LEGS, FLAG))["label"]
    with refused(ErrorCode.REWARDS_FAILED):
        find_entry(label[:-8] + "00000000")


LABELS = """
from openrlhf.data import reasoning_gym
def labels(names):
    rows = {n: list(reasoning_gym.gym_rows(f"reasoning_gym:{n}?size=4&seed=5", "--flag")) for n in names}
    return {name: [row["label"] for row in made] for name, made in rows.items()}
"""
ELSEWHERE = f"""
import json, sys
{LABELS}
reasoning_gym.NOT_REPEATABLE = ()
json.dump(labels(json.loads(sys.argv[1])), sys.stdout)
"""


@pytest.mark.processes
def test_other_processes_make_the_same_problems(monkeypatch):
    """Datasets that fail this are refused and not tested here. The other process hashes texts otherwise."""
    names = ["leg_counting", "chain_sum", "basic_arithmetic", "word_ladder", "countdown"]
    unsteady = ["isomorphic_strings", "polynomial_multiplication", "ransom_note"]
    assert set(unsteady) <= set(NOT_REPEATABLE)
    monkeypatch.setattr(reasoning_gym, "NOT_REPEATABLE", ())
    exec(LABELS, scope := {})
    here = scope["labels"](names + unsteady)
    monkeypatch.setenv("PYTHONHASHSEED", "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    command = [sys.executable, "-c", ELSEWHERE, json.dumps(names + unsteady)]
    there = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {name for name in here if here[name] != there[name]} == set(unsteady)


@pytest.mark.parametrize(
    ("item", "code", "name"),
    [
        ("leg_countin", ErrorCode.NOT_FOUND, "leg_counting?"),
        ("leg_counting?max_animal=3", ErrorCode.INVALID_VALUE, "max_animals?"),
        ("leg_counting?min_animals=9&max_animals=2", ErrorCode.INVALID_VALUE, "leg_counting"),
        ("leg_counting?max_animals=many", ErrorCode.INVALID_VALUE, "leg_counting"),
        ("leg_counting?size=0", ErrorCode.INVALID_VALUE, "size=0"),
        ("leg_counting?size=many", ErrorCode.INVALID_VALUE, "size=many"),
        ("leg_counting?seed=-1", ErrorCode.INVALID_VALUE, "seed=-1"),
        ("leg_counting?size", ErrorCode.INVALID_VALUE, "reasoning_gym:leg_counting?size=1000&seed=1"),
        ("leg_counting?size=1&size=2", ErrorCode.INVALID_VALUE, "size"),
        ("", ErrorCode.INVALID_VALUE, "reasoning_gym:NAME"),
        ("ransom_note", ErrorCode.UNSUPPORTED, "ransom_note"),
        ("composite", ErrorCode.UNSUPPORTED, "--data.prompt_probs"),
    ],
)
def test_a_wrong_specification_is_refused(item, code, name):
    with refused(code, flag=FLAG, value=f"reasoning_gym:{item}") as told:
        check_columns(f"reasoning_gym:{item}", flag=FLAG, required_columns={})
    assert name in told.value.text
    assert len(str(told.value).splitlines()) <= 3


def test_a_column_that_they_do_not_have():
    with refused(ErrorCode.MISSING_COLUMN, flag="--data.label_key", value="answer") as told:
        check_columns(LEGS, flag=FLAG, required_columns={"--data.label_key": "answer"})
    assert "input, label, datasource" in told.value.text


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with refused(ErrorCode.MISSING_PACKAGE, flag=FLAG, value=LEGS, told="openrlhf[gym]"):
        gym_dataset(LEGS, FLAG)


def test_values_of_parameters():
    spec = parse_gym("reasoning_gym:x?a=1&b=0.5&c=true&d=False&e=None&f=text&g=%5B1%2C2%5D&h=a%26b&i=%2B")
    plain = {"a": 1, "b": 0.5, "c": True, "d": False, "e": None}
    assert spec.parameters == plain | {"f": "text", "g": [1, 2], "h": "a&b", "i": "+"}
    assert (spec.size, spec.seed) == (500, 42)


def configured(prompts, evaluation=None, url=None, label_key=None):
    return PPOConfig(
        data=PromptDataConfig(prompt_dataset=prompts, label_key=label_key),
        eval=EvalConfig(dataset=evaluation),
        reward=RewardConfig(remote_url=url),
    )


def test_the_verifier_gives_the_reward_unless_a_function_is_named():
    assert configured(f"{LEGS},{CHAIN}").reward_function == GYM_VERIFIER
    assert configured(LEGS, evaluation=CHAIN).label_key == "label"
    assert configured(LEGS, label_key="other").label_key == "other"
    assert configured(LEGS, url="own.py").reward_function == "own.py"
    assert configured(LEGS, url="own.py").label_key is None
    for other in (configured(f"{LEGS},own.jsonl"), configured(LEGS, evaluation="own.jsonl"), configured("")):
        assert other.reward_function is None


PPO_FLAGS = (
    *("--actor.model_name_or_path", "some/model", "--algo.advantage.estimator", "group_norm"),
    *("--rollout.n_samples_per_prompt", "2", "--rollout.batch_size", "8", "--train.batch_size", "16"),
)


def test_the_verifier_is_source_enough(capsys):
    flags = ["--data.prompt_dataset", f"{LEGS},{CHAIN}", "--reward.batch", "4", "--reward.timeout", "9"]
    config = parse(PPO, [*PPO_FLAGS, *flags]).config
    assert config.gym_verifies and config.reward.batch == 4
    assert "reward." not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "place"),
    [
        (["--data.prompt_dataset", f"{LEGS},some/hub"], "missing-flag", "--reward.remote_url"),
        (
            ["--data.prompt_dataset", LEGS, "--eval.dataset", "some/hub"],
            "missing-flag",
            "--eval.dataset some/hub",
        ),
        (
            ["--data.prompt_dataset", "reasoning_gym:x?size=no"],
            "invalid-value",
            "--data.prompt_dataset reasoning_gym:x?size=no",
        ),
    ],
)
def test_what_is_refused_before_anything_starts(capsys, flags, code, place):
    with pytest.raises(SystemExit):
        parse(PPO, [*PPO_FLAGS, *flags])
    assert (code, place) in [error[:2] for error in printed(capsys.readouterr().err)]


@pytest.mark.parametrize(
    ("evaluation", "overlaps"), [("seed=11", True), ("seed=12", False), ("seed=2", False)]
)
def test_evaluation_on_problems_of_training_is_remarked_upon(capsys, evaluation, overlaps):
    """The i-th problem of training has seed 7 + i, for 5 problems."""
    held_out = LEGS.replace("seed=7", evaluation)
    flags = ["--data.prompt_dataset", LEGS, "--eval.dataset", held_out, "--eval.steps", "5"]
    parse(PPO, [*PPO_FLAGS, *flags])
    told = capsys.readouterr().err
    assert (f"note: --eval.dataset {held_out}: " in told and "such as 12" in told) == overlaps
    shared = {row["input"] for row in load(LEGS)} & {row["input"] for row in load(held_out)}
    assert bool(shared) == overlaps


def test_a_reward_batch_without_a_function_has_no_effect(capsys):
    source = ["--data.prompt_dataset", "some/data", "--reward.remote_url", "http://a:1/x"]
    parse(PPO, [*PPO_FLAGS, *source, "--reward.batch", "4"])
    assert "reward.batch" in capsys.readouterr().err
