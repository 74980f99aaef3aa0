"""Plain text begins with the tokens that the tokenizer puts in front of a text, whatever it is read for; a
chat begins with those that its template writes."""

import asyncio
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from records import trajectory
from refusals import refused
from tokenizers import processors
from tokenizers_of_users import llama_2_style
from transformers import Qwen3Config

from openrlhf.agents.base import Reward, SingleTurnAgentExecutor
from openrlhf.data.cache import tokenizer_digest
from openrlhf.data.inference import build_answers, build_questions
from openrlhf.data.preference import build_pairs
from openrlhf.data.prompts import build_prompts
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows
from openrlhf.data.steps import build_steps
from openrlhf.data.unpaired import build_unpaired
from openrlhf.errors import ErrorCode
from openrlhf.rewards.models import RewardReader
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.text import first_token_ids
from openrlhf.tools.plan.flags import data as preview
from openrlhf.tools.serve import interactive_chat
from openrlhf.tools.serve.flags import chat
from openrlhf.tools.serve.scoring import TextScorer
from openrlhf.tools.serve.server import prepare_text
from openrlhf.utils import prompt_token_ids

WRITES_FIRST = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
WRITES_NONE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def with_first(tokenizer, *tokens: str):
    """Returns a tokenizer that puts these tokens in front of a text, as those of Llama, Mistral and Gemma do
    with one token."""
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*tokens, "$A"]), special_tokens=pairs
    )
    return tokenizer


def tiny_with_first():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    tokenizer.bos_token = "<s>"
    return with_first(tokenizer, "<s>")


TINY = tiny_with_first()
TOKENIZERS = {
    "byte level": TINY,
    "spaces before words": with_first(llama_2_style(), "<s>"),
    "two tokens": with_first(llama_2_style(), "<unk>", "<s>"),
    "none": tiny_tokenizer(),
}
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
PLAIN = {"apply_chat_template": False, "input_template": None}
CHAT_TEMPLATE = {"apply_chat_template": True, "input_template": None}


def as_transformers(tokenizer, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("name", "first"),
    [("byte level", "<s>"), ("two tokens", "<unk><s>"), ("spaces before words", "<s>"), ("none", "")],
)
def test_what_a_tokenizer_puts_in_front(name, first):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(first_token_ids(tokenizer)) == first


def test_what_a_tokenizer_puts_behind_is_not_in_front():
    tokenizer = tiny_with_first()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <s>", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert first_token_ids(tokenizer) == []


@ALL
def test_a_prompt_reads_as_with_transformers(tokenizer):
    assert prompt_token_ids(tokenizer, "2 + 2", is_chat=False) == as_transformers(tokenizer, "2 + 2")
    alone = tokenizer("2 + 2", add_special_tokens=False)["input_ids"]
    assert prompt_token_ids(tokenizer, "2 + 2", is_chat=True) == alone
    assert prompt_token_ids(tokenizer, "", is_chat=False) == []


def test_a_text_that_begins_with_it_does_not_get_two():
    assert prompt_token_ids(TINY, "<s>2 + 2", is_chat=False) == as_transformers(TINY, "2 + 2")


@ALL
@pytest.mark.parametrize("template", [None, "Q {} A "])
def test_supervised_samples(tokenizer, template):
    prompt, answer, other = "2 + 2 ", "the answer is 4", "is 2"
    row = {"p": prompt, "a": answer, "b": other, "label": True}
    rows = Rows.of([row, row | {"p": "4 + 2 "}], "rows.json")
    asked = prompt if template is None else template.format(prompt)
    options = {"apply_chat_template": False, "input_template": template, "max_len": 64}
    whole = as_transformers(tokenizer, asked)
    samples = [
        build_sft_samples(
            rows, tokenizer, input_key="p", output_key="a", multiturn=False, pretrain=False, **options
        )[0],
        build_unpaired(rows, tokenizer, input_key="p", output_key="a", label_key="label", seed=0, **options)[
            0
        ].sample,
    ]
    pairs = {"prompt_key": "p", "chosen_key": "a", "rejected_key": "b"}
    pair = build_pairs(rows, tokenizer, **pairs, **options, score_last_token=False)[0]
    for sample in (*samples, pair.chosen, pair.rejected):
        token_ids = sample.token_ids.tolist()
        assert token_ids[: len(whole)] == whole
        assert sample.action_mask.tolist() == [False] * len(whole) + [True] * (len(token_ids) - len(whole))
    scored = build_pairs(rows, tokenizer, **pairs, **options, score_last_token=True)[0]
    assert scored.chosen.token_ids.tolist() == pair.chosen.token_ids.tolist()


@ALL
def test_plain_text(tokenizer):
    text = "the answer is 4"
    options = {"input_key": "t", "output_key": None, "multiturn": False, "pretrain": True, "max_len": 64}
    (sample,) = build_sft_samples(Rows.of([{"t": text}], "rows.json"), tokenizer, **options, **PLAIN)
    assert sample.token_ids.tolist() == as_transformers(tokenizer, text)
    num_first = max(1, len(first_token_ids(tokenizer)))  # nothing predicts the first token of a text
    assert sample.action_mask.tolist() == [False] * num_first + [True] * (sample.length - num_first)


@ALL
def test_rows_of_steps_begin_with_the_first_tokens(tokenizer):
    end = tokenizer.eos_token

    def build(text: str):
        options = {"input_key": "t", "label_key": "label", "placeholder_token": end, "max_len": 64}
        rows = Rows.of([{"t": text, "label": [1.0]}])
        return build_steps(rows, tokenizer, reward_tokens=["4", "2"], **options)

    assert build(f"2 + 2{end}")[0].sample.token_ids.tolist() == as_transformers(tokenizer, f"2 + 2{end}")
    with pytest.raises(ValueError, match="the text begins with the placeholder"):
        build(f"{end}2")


@pytest.mark.parametrize("template", [WRITES_FIRST, WRITES_NONE])
def test_a_chat_template_decides_for_itself(template):
    tokenizer = tiny_with_first()
    tokenizer.chat_template = template
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    count = 1 if template == WRITES_FIRST else 0
    expected = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    assert expected.count(tokenizer.bos_token_id) == count
    rows = Rows.of([{"p": "1", "a": "2", "b": "3", "label": True}, {"p": "4", "a": "2", "label": False}])
    pairs = {"prompt_key": "p", "chosen_key": "a", "rejected_key": "b", "max_len": 64, "bad_rows": "skip"}
    one = {"input_key": "p", "output_key": "a", "max_len": 64}
    built = [
        build_sft_samples(rows, tokenizer, **one, multiturn=False, pretrain=False, **CHAT_TEMPLATE)[0],
        build_unpaired(rows, tokenizer, **one, label_key="label", seed=0, **CHAT_TEMPLATE)[0].sample,
        build_pairs(rows, tokenizer, **pairs, score_last_token=True, **CHAT_TEMPLATE)[0].chosen,
        build_answers(rows, tokenizer, **one, **CHAT_TEMPLATE)[0].sample,
    ]
    for sample in built:
        assert sample.token_ids.tolist() == [*expected, tokenizer.eos_token_id]
    question = {"input_key": "p", "suffix": None, "max_len": 64}
    (asked, _) = build_questions(rows, [0, 1], tokenizer, **question, **CHAT_TEMPLATE)
    assert asked.token_ids.count(tokenizer.bos_token_id) == count


@ALL
def test_batch_inference(tokenizer):
    rows = Rows.of([{"p": "2 + 2 ", "a": "4"}])
    question = {"input_key": "p", "suffix": None, "max_len": 64}
    (asked,) = build_questions(rows, [0], tokenizer, **question, **PLAIN)
    assert asked.token_ids == as_transformers(tokenizer, "2 + 2 ")
    (answer,) = build_answers(rows, tokenizer, input_key="p", output_key="a", max_len=64, **PLAIN)
    assert answer.sample.token_ids.tolist()[: len(asked.token_ids)] == asked.token_ids


@ALL
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_a_policy_is_asked_in_rl_is_what_was_counted(tokenizer, is_chat):
    asked = []

    class Engine:
        async def generate(self, prompt_ids, params, images=None):
            asked.append(prompt_ids)
            output = SimpleNamespace(
                token_ids=[5], finish_reason="stop", logprobs=[{5: SimpleNamespace(logprob=0.0)}]
            )
            return SimpleNamespace(outputs=[SimpleNamespace(**vars(output), weight_versions=())])

    async def reward(query: str, prompt: str, label: str) -> Reward:
        return Reward(reward=0.0, score=0.0)

    executor = SingleTurnAgentExecutor(reward, is_chat=is_chat)
    asyncio.run(executor.execute("2 + 2", "", SimpleNamespace(max_tokens=None), 100, tokenizer, Engine()))
    assert asked == [prompt_token_ids(tokenizer, "2 + 2", is_chat=is_chat)]
    if not is_chat:
        options = {"input_key": "p", "label_key": None, **PLAIN}
        build_prompts(Rows.of([{"p": "2 + 2"}]), tokenizer, max_len=len(asked[0]) + 1, **options)
        with refused(ErrorCode.NO_ROWS):
            build_prompts(Rows.of([{"p": "2 + 2"}]), tokenizer, max_len=len(asked[0]), **options)


def test_a_reward_model_of_another_vocabulary_reads_its_own_first_token():
    policy = llama_2_style()
    policy.add_tokens(["<new>"])
    token_ids = prompt_token_ids(policy, "2 + 2", is_chat=False)
    sample = trajectory(
        0.0,
        text="2 + 2",
        token_ids=[*token_ids, policy.eos_token_id],
        action_mask=[False] * len(token_ids) + [True],
    )
    read = RewardReader(policy, TINY, stop_token_ids=[policy.eos_token_id], max_len=None)(sample)
    assert read.token_ids.tolist() == [*as_transformers(TINY, "2 + 2"), TINY.eos_token_id]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_served_reward_model(is_chat):
    rows = []

    class Model(torch.nn.Linear):
        model = SimpleNamespace(config=Qwen3Config(vocab_size=len(TINY)))

        def forward(self, input):
            rows.append(input.token_ids.tolist())
            return torch.zeros(1)

    TextScorer(Model(1, 1), TINY, max_len=64, max_tokens=100)([prepare_text("2 + 2", "", is_chat)])
    assert rows == [[*prompt_token_ids(TINY, "2 + 2", is_chat=is_chat), TINY.eos_token_id]]


@pytest.fixture
def model(tmp_path):
    folder = tiny_chat_model(tmp_path / "model", vocab_size=400)
    TINY.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("template", "first_tokens"), [("false", 1), ("true", 0)])
def test_a_chat_prompt_begins_with_the_first_tokens(model, monkeypatch, template, first_tokens):
    asked = []

    class Engine:
        def stream(self, prompt, seed, params):
            asked.append(prompt)
            return (token for token in [5])

        def close(self):
            pass

    monkeypatch.setattr(sys, "stdin", io.StringIO("2 + 2\n"))
    monkeypatch.setattr(interactive_chat, "_load", lambda *_: Engine())
    argv = ["--model.model_name_or_path", model, "--data.max_len", "128"]
    chat([*argv, "--data.apply_chat_template", template])
    assert asked[0].count(TINY.bos_token_id) == first_tokens


@pytest.mark.parametrize(
    ("flags", "word", "count"),
    [
        ("--data.input_template {}=", "every text", 1),
        ("--data.apply_chat_template", "the template decides", 0),
    ],
)
def test_the_preview_tells(model, tmp_path, capsys, flags, word, count):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1", "output": "2"}) + "\n")
    base = f"--model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl --data.output_key output"
    preview(["preview", "sft", *base.split(), *flags.split()])
    out = capsys.readouterr().out
    first = out.partition("\n")[0]
    assert "<s>" in first and word in first
    assert out.split("\n\n")[1].count("<s>") == count


def test_kept_rows_are_of_one_first_token():
    digests = [tokenizer_digest(tokenizer) for tokenizer in (tiny_tokenizer(), tiny_with_first())]
    without = tiny_with_first()
    without.backend_tokenizer.post_processor = processors.ByteLevel()
    assert len({*digests, tokenizer_digest(without)}) == 3
