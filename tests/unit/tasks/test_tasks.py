import json
import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.data.prompts import build_prompts
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import load_rows
from openrlhf.tasks.prepare import REWARD_FILE, prepare
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tasks.word_problem import (
    boxed_answer,
    make_problem,
    make_problems,
    solution,
    thinks,
    worked_problem,
)
from openrlhf.tasks.word_problem_reward import reward_func


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare(
        tmp_path_factory.mktemp("task"), num_pretrain=300, num_sft=200, num_prompts=100, num_eval=50
    )


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_steps_lead_from_the_question_to_the_answer():
    rng = random.Random(0)
    for _ in range(500):
        problem = make_problem(rng)
        assert 2 <= len(problem.steps) <= 4
        start = problem.question.split()[2]
        for step in problem.steps:
            left, right = step.split("=")
            assert left.startswith(start)
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 99
            start = right
        assert problem.answer == start


def test_solutions_are_right_and_only_the_careful_one_thinks():
    (problem,) = make_problems(1, seed=3)
    for careful in (True, False):
        assert boxed_answer(solution(problem, careful=careful)) == problem.answer
        assert thinks(solution(problem, careful=careful)) is careful


def test_problems_depend_on_the_seed_and_differ():
    assert make_problems(50, seed=1) == make_problems(50, seed=1)
    assert make_problems(50, seed=1) != make_problems(50, seed=2)
    assert max(Counter(problem.question for problem in make_problems(3000, seed=1)).values()) == 1


@pytest.mark.parametrize(
    ("response", "reward", "thought", "boxed"),
    [
        ("<think>1+1=2</think>\\boxed{2}<|end|>", 1.0, 1.0, 1.0),
        ("<think></think>\\boxed{2}<|end|>", 1.0, 0.0, 1.0),
        ("\\boxed{2} no, \\boxed{3}", 0.0, 0.0, 1.0),
        ("\\boxed{02}", 0.0, 0.0, 1.0),
        ("\\boxed{2", 0.0, 0.0, 0.0),
        ("1+1=2", 0.0, 0.0, 0.0),
    ],
)
def test_reward(response, reward, thought, boxed):
    result = reward_func(["How many? " + response], ["How many? "], ["2"])
    assert result == {
        "rewards": [reward],
        "scores": [reward],
        "extra_logs": {"thinks": [thought], "format": [boxed]},
    }


def test_a_box_in_the_prompt_earns_nothing():
    prompt = "Answer in \\boxed{2}: "
    assert reward_func([prompt + "no"], [prompt], ["2"])["rewards"] == [0.0]


@pytest.mark.parametrize("lists", [(["a", "b"], ["a"], ["2"]), (["a", "b"], ["a", "b"], ["2"])])
def test_every_query_has_a_prompt_and_a_label(lists):
    with pytest.raises(ValueError, match="zip"):
        reward_func(*lists)


def test_the_reward_file_is_found():
    assert "def reward_func(queries" in REWARD_FILE.read_text()


def test_files_have_what_the_trainers_read(files):
    assert [len(read(path)) for path in (files.pretrain, files.sft, files.prompts, files.eval)] == [
        300,
        200,
        100,
        50,
    ]
    held_out = {row["input"] for row in read(files.eval)}
    for path in (files.pretrain, files.sft, files.prompts):
        assert not held_out & {row["input"].partition("\n")[0] for row in read(path)}
    careful = [thinks(row["output"]) for row in read(files.sft)]
    assert sum(careful) / len(careful) == pytest.approx(0.4, abs=0.1)


def test_files_are_the_same_for_the_same_seed(files, tmp_path):
    again = prepare(tmp_path / "again", num_pretrain=300, num_sft=200, num_prompts=100, num_eval=50)
    other = prepare(tmp_path / "other", seed=1, num_pretrain=300, num_sft=200, num_prompts=100, num_eval=50)
    for name in ("pretrain", "sft", "prompts", "eval"):
        assert getattr(again, name).read_bytes() == getattr(files, name).read_bytes()
    assert (again.model / "model.safetensors").read_bytes() == (
        files.model / "model.safetensors"
    ).read_bytes()
    assert (again.model / "tokenizer.json").read_bytes() == (files.model / "tokenizer.json").read_bytes()
    assert other.sft.read_bytes() != files.sft.read_bytes()
    assert other.eval.read_bytes() == files.eval.read_bytes()
    assert (other.model / "model.safetensors").read_bytes() != (
        files.model / "model.safetensors"
    ).read_bytes()


def test_the_model_and_its_tokenizer_load_as_any_other(files):
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    model = AutoModelForCausalLM.from_pretrained(files.model)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 368
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer("hi", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], 368)


def test_making_a_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    tiny_chat_model(tmp_path, hidden_size=32, num_layers=1)
    assert torch.equal(torch.rand(1), expected)


def test_the_numbers_are_as_far_from_the_answer_in_plain_text_as_in_a_chat():
    tokenizer = tiny_tokenizer()
    (problem,) = make_problems(1, seed=5)
    answer = solution(problem, careful=True)
    talk = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]
    chat = (
        tokenizer.apply_chat_template(talk, tokenize=False).removeprefix("<|user|>").removesuffix("<|end|>")
    )
    assert len(tokenizer(chat)["input_ids"]) == len(tokenizer(worked_problem(problem))["input_ids"])


def test_the_tokenizer_keeps_every_text_and_splits_digits():
    tokenizer = tiny_tokenizer()
    (problem,) = make_problems(1, seed=5)
    for text in (f"{problem.question}\n{solution(problem, careful=True)}", "ünïcode 😀 and\ttabs\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
    assert len(tokenizer("<think></think>\\boxed{")["input_ids"]) == 3


def test_the_files_go_through_the_datasets(files):
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    columns = {"--data.input_key": "input"}
    sft = build_sft_samples(
        load_rows(str(files.sft), flag="--data.dataset", required_columns=columns),
        tokenizer,
        input_key="input",
        output_key="output",
        apply_chat_template=True,
        input_template=None,
        multiturn=False,
        pretrain=False,
        max_len=128,
    )
    assert len(sft) == 200
    assert not sft.skipped
    assert not sft.truncated
    row = read(files.sft)[0]
    assert tokenizer.decode(sft[0].token_ids[sft[0].action_mask]) == row["output"] + "<|end|>"
    prompts = build_prompts(
        load_rows(str(files.prompts), flag="--data.prompt_dataset", required_columns=columns),
        tokenizer,
        input_key="input",
        label_key="label",
        apply_chat_template=True,
        input_template=None,
        max_len=128,
    )
    assert [prompt.label for prompt in prompts] == [row["label"] for row in read(files.prompts)]
