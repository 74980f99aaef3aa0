import hashlib
import json
import zlib
from dataclasses import replace
from itertools import chain

import pytest
from refusals import refused

from openrlhf.config.fields import list_flags, with_values
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    EvalConfig,
    PPOConfig,
    PromptDataConfig,
    RewardConfig,
)
from openrlhf.data.files import REMEDY
from openrlhf.data.prompt_sampler import PromptDataset, PromptDraws, PromptSampler
from openrlhf.data.prompts import LONG_PROMPT, build_prompts, source_names
from openrlhf.data.sources import Rows, load_rows
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_model, tiny_tokenizer
from openrlhf.training.rl_data import (
    build_data,
    build_prompt_datasets,
    build_sampler,
    pretrain_column,
    prompt_columns,
)
from openrlhf.training.schedule import prompts_of_steps
from openrlhf.types import Prompt

OPTIONS = {
    "input_key": "input",
    "label_key": None,
    "apply_chat_template": True,
    "input_template": None,
    "max_len": 64,
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def build(rows, tokenizer, **changes):
    return build_prompts(Rows.of(rows, "rows.json"), tokenizer, **(OPTIONS | changes))


def test_a_prompt_with_a_token_without_an_embedding_is_a_bad_row(tokenizer):
    (number,) = tokenizer("7", add_special_tokens=False)["input_ids"]
    rows = [{"input": f"{n} limes"} for n in (5, 7, 8)]
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=2):
        build(rows, tokenizer, missing={number: "7"})
    kept = build(rows, tokenizer, missing={number: "7"}, bad_rows="skip")
    assert [prompt.prompt_id for prompt in kept] == [0, 2]


def test_a_text_is_one_user_message(tokenizer):
    prompts = build([{"input": "hi", "answer": 7}], tokenizer, label_key="answer")
    text, messages = "<|user|>hi<|end|><|assistant|>", [{"role": "user", "content": "hi"}]
    assert list(prompts) == [
        Prompt(prompt_id=0, text=text, label=7, messages=messages, num_tokens=len("hi") + 3)
    ]


def test_messages_are_used_as_they_are(tokenizer):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    (prompt,) = build([{"input": messages, "datasource": "chat"}], tokenizer)
    assert prompt.text == ("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>")
    assert (prompt.label, prompt.source) == ("", "chat")


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizer):
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "It is "}]
    (prompt,) = build([{"input": messages}], tokenizer)
    assert prompt.text == "<|user|>2+2<|end|><|assistant|>It is "
    assert prompt.messages == messages
    (other,) = build([{"input": [*messages, {"role": "tool", "content": "4"}]}], tokenizer)
    assert other.text == "<|user|>2+2<|end|><|assistant|>It is <|end|><|tool|>4<|end|><|assistant|>"


@pytest.mark.parametrize("content", ["", "4<|end|>", None])
def test_an_answer_that_cannot_be_continued_is_refused(tokenizer, content):
    answer = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f"}}]}
    with refused(ErrorCode.CHAT_TEMPLATE if content else ErrorCode.INVALID_ROW, value="rows.json", row=1):
        build([{"input": [{"role": "user", "content": "2+2"}, answer]}], tokenizer)


def test_a_prompt_of_which_the_template_leaves_out_a_message_is_refused(tokenizer, monkeypatch):
    template = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    asked = {"role": "user", "content": "2+2"}
    build([{"input": [asked]}], tokenizer)
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1) as told:
        build([{"input": [{"role": "system", "content": "be kind"}, asked]}], tokenizer)
    assert "leaves out the content of message 1 (system)" in told.value.text


def test_special_tokens_in_a_message_are_pointed_out_once(capsys):
    """A text without a chat template may have them: it is rendered already."""
    tokenizer = tiny_tokenizer()
    rows = [{"input": "fine"}, {"input": "<|user|>hi<|end|>"}, {"input": "<|end|>"}]
    build(rows, tokenizer, apply_chat_template=False)
    build(rows[:1], tokenizer)
    assert not capsys.readouterr().err
    build(rows, tokenizer)
    (said,) = capsys.readouterr().err.split("note: ")[1:]
    assert "user contains <|user|>: '<|user|>hi<|end|>'" in said and "--data.apply_chat_template" in said


def test_the_longest_special_token_in_a_message_is_the_one_that_is_named(capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<a>b", "<a>bc"]})
    build([{"input": "see <a>bc"}], tokenizer)
    assert "contains <a>bc: " in capsys.readouterr().err


@pytest.mark.parametrize("names_every_role", [False, True])
def test_a_template_that_does_not_begin_an_answer_is_pointed_out(capsys, names_every_role):
    """The prompt would end before `<|assistant|>`. A template that writes no header has none to miss."""
    tokenizer = tiny_tokenizer()
    template = tokenizer.chat_template.replace("{% if add_generation_prompt %}<|assistant|>{% endif %}", "")
    if not names_every_role:
        template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
        template = template.replace("[{{", "{% if message['role'] == 'user' %}[{% endif %}{{")
    assert template != tokenizer.chat_template
    tokenizer.chat_template = template
    for _ in range(2):
        build([{"input": "hi"}], tokenizer)
    said = capsys.readouterr().err
    assert said.count("note: ") == names_every_role
    if names_every_role:
        assert "'<|assistant|>'" in said and "--data.tokenizer_chat_template" in said


def test_input_template(tokenizer):
    changes = {"apply_chat_template": False, "input_template": "User: {}\nAnswer in \\boxed{{}}: "}
    assert build([{"input": "hi {x}"}], tokenizer, **changes)[0].text == "User: hi {x}\nAnswer in \\boxed{}: "
    assert build([{"input": "hi"}], tokenizer, apply_chat_template=False)[0].text == "hi"


def test_a_tokenizer_without_a_chat_template(tokenizer):
    bare = tiny_tokenizer()
    bare.chat_template = None
    with refused(ErrorCode.CHAT_TEMPLATE, flag="--data.apply_chat_template") as told:
        build([{"input": "hi"}], bare)
    assert "--data.tokenizer_chat_template" in told.value.text


BAD = {
    "null": ({"input": None}, "'input' is null"),
    "missing": ({"prompt": "x"}, "'input' is missing"),
    "number": ({"input": 3}, "'input' is a number"),
    "no messages": ({"input": []}, "empty"),
    "no role": ({"input": [{"content": "x"}]}, "message 1"),
    "no content": ({"input": [{"role": "user", "content": None}]}, "message 1 (user)"),
    "null label": ({"input": "x", "label": None}, "'label' is null"),
    "nan label": ({"input": "x", "label": float("nan")}, "'label' is NaN"),
    "too long": ({"input": "x " * 60, "label": 1}, "--data.max_len 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(tokenizer, case):
    row, reason = BAD[case]
    rows = [{"input": "fine", "label": "1"}, row, {"input": "good", "label": "2"}]
    code = ErrorCode.TOO_LONG if case == "too long" else ErrorCode.INVALID_ROW
    with refused(code, value="rows.json", row=2, told=(reason, REMEDY)):
        build(rows, tokenizer, label_key="label", bad_rows="error")
    prompts = build(rows, tokenizer, label_key="label", bad_rows="skip")
    assert [prompt.prompt_id for prompt in prompts] == [0, 2]
    assert prompts.skipped == {"bad row": 1}


@pytest.mark.parametrize("case", [case for case in BAD if case != "too long"])
def test_a_bad_row_stops_a_run_that_does_not_say(tokenizer, case):
    row, reason = BAD[case]
    with refused(ErrorCode.INVALID_ROW, value="rows.json", row=1, told=reason):
        build([row], tokenizer, label_key="label")


def test_prompts_that_are_too_long_are_dropped_and_counted(tokenizer):
    rows = [{"input": "fine"}, {"input": "x " * 60}, {"input": "x " * 80}, {"input": "good"}]
    prompts = build(rows, tokenizer)
    assert [prompt.prompt_id for prompt in prompts] == [0, 3]
    assert prompts.skipped == {LONG_PROMPT: 2}
    remedy = f"--data.max_len {prompts.needed_len} would keep every row whole"
    assert len(build(rows, tokenizer, max_len=prompts.needed_len)) == 4
    assert len(build(rows, tokenizer, max_len=prompts.needed_len - 1)) == 3
    with refused(ErrorCode.NO_ROWS, value="rows.json") as told:
        build(rows[1:3], tokenizer)
    assert told.value.text.startswith(f"no prompt is left of 2 rows: 2 × {LONG_PROMPT}")
    assert remedy in told.value.text


def test_a_bad_row_of_a_file_is_named_with_its_line(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps({"input": "x"}) + "\n" + json.dumps({"input": None}) + "\n")
    rows = load_rows(str(path), flag="--data.prompt_dataset", required_columns={"--data.input_key": "input"})
    with refused(ErrorCode.INVALID_ROW, value=path, row=3):
        build_prompts(rows, tokenizer, **OPTIONS)


def test_a_prompt_of_max_len_minus_one_tokens_is_the_longest(tokenizer):
    text = build([{"input": "a b c"}], tokenizer)[0].text
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(build([{"input": "a b c"}], tokenizer, max_len=tokens + 1)) == 1
    with refused(ErrorCode.TOO_LONG, told=f"{tokens} tokens"):
        build([{"input": "a b c"}], tokenizer, max_len=tokens, bad_rows="error")


def test_nothing_left_is_an_error(tokenizer):
    with refused(ErrorCode.NO_ROWS, told="1 × bad row"):
        build([{"input": None}], tokenizer, bad_rows="skip")


def test_a_template_that_refuses_a_row(tokenizer):
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with refused(ErrorCode.CHAT_TEMPLATE, value="rows.json", row=1, told="roles must alternate"):
        build([{"input": "x"}], strict)


def test_ids_begin_where_they_are_told_to(tokenizer):
    rows = [{"input": "a"}, {"input": None}, {"input": "b"}]
    prompts = build(rows, tokenizer, first_id=10, bad_rows="skip", source="math")
    assert [(p.prompt_id, p.source) for p in prompts] == [(10, "math"), (12, "math")]


@pytest.mark.parametrize(
    ("items", "names"),
    [
        (["held_out.jsonl"], ["default"]),
        (["a.jsonl", "data/b.v2.parquet"], ["a", "b_v2"]),
        (["a/test.jsonl", "/data/b/test.jsonl"], ["a_test", "b_test"]),
        (["openai/gsm8k@main", "./aime/"], ["gsm8k_main", "aime"]),
        (["a.jsonl", "a.jsonl"], ["a_1", "a_2"]),
        (["a.jsonl", "x/a.parquet", "b"], ["a", "x_a", "b"]),
        ([], []),
    ],
)
def test_what_evaluation_sets_are_called(items, names):
    assert source_names(items) == names


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    tiny_model(tokenizer).config.save_pretrained(folder)
    return folder


def eval_prompts(model_folder, dataset, **data):
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(model_folder)),
        data=PromptDataConfig(prompt_dataset=dataset.split(",")[0], max_len=64, **data),
        eval=EvalConfig(dataset=dataset, max_samples=2),
    )
    return build_prompt_datasets(config)[1]


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_evaluation_sets_with_the_same_texts_are_told_apart(model_folder, tmp_path):
    """`max_samples` is of each set, a skipped row keeps its id, and a `datasource` column comes first."""
    rows = [{"input": "the same text"}, {"input": None}, {"input": "one too many"}]
    one = write(tmp_path / "a" / "test.jsonl", rows)
    two = write(tmp_path / "b" / "test.jsonl", [rows[0], rows[0] | {"datasource": "own"}])
    prompts = eval_prompts(model_folder, f"{one},{two}", bad_rows="skip")
    assert [(p.prompt_id, p.source) for p in prompts] == [(0, "a_test"), (2, "b_test"), (3, "own")]
    assert len({p.text for p in prompts}) == 1


def test_prompts_are_those_of_their_split(model_folder, tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [{"input": split}])
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(model_folder)),
        data=PromptDataConfig(prompt_dataset=str(tmp_path), max_len=64, prompt_split="test"),
        eval=EvalConfig(dataset=str(tmp_path), split="train"),
    )
    prompts, held_out, _ = build_prompt_datasets(config)
    assert "test" in prompts[0].text and "train" in held_out[0].text


def test_one_evaluation_set_is_the_default_source(model_folder, tmp_path):
    one = write(tmp_path / "test.jsonl", [{"input": "x"}, {"input": "y", "datasource": "own"}])
    prompts = eval_prompts(model_folder, one)
    assert [(p.prompt_id, p.source) for p in prompts] == [(0, "default"), (1, "own")]


def task_config(model_folder, tmp_path, tasks, **changes):
    """Prompts of two files, the second of which has a row with a source of its own."""
    math = write(tmp_path / "math.jsonl", [{"input": f"math {i}"} for i in range(3)])
    chat = write(tmp_path / "chat.jsonl", [{"input": "chat"}, {"input": "x", "datasource": "open/code"}])
    held = write(tmp_path / "held-out.jsonl", [{"input": "held out"}])
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(model_folder)),
        data=PromptDataConfig(prompt_dataset=f"{math},{chat}", max_len=64),
        eval=EvalConfig(dataset=f"{held},{math}"),
        reward=RewardConfig(remote_url="http://host/reward"),
        tasks=tasks,
    )
    return with_values(config, changes)


QUOTAS = {"math.quota": 4, "chat.quota": 2, "open_code.quota": 2}


def test_tasks_are_the_datasets_of_a_list_or_the_sources_of_rows(model_folder, tmp_path):
    config = task_config(model_folder, tmp_path, QUOTAS | {"held_out.reward": "http://own/reward"})
    prompts, held_out, _ = build_prompt_datasets(config)
    assert [(p.prompt_id, p.source) for p in prompts] == [
        *((0, "math"), (1, "math"), (2, "math"), (3, "chat"), (4, "open_code"))
    ]
    assert [p.source for p in held_out] == ["held_out", "math", "math", "math"]
    sampler = build_sampler(config, prompts)
    assert isinstance(sampler, PromptDraws) and sampler.quotas == {"chat": 2, "math": 4, "open_code": 2}
    for most, sources in ((2, ["math"] * 2), (4, ["math"] * 3 + ["chat"])):
        config = task_config(model_folder, tmp_path, {"math.temperature": 0.5}, **{"data.max_samples": most})
        assert [p.source for p in build_prompt_datasets(config)[0]] == sources


@pytest.mark.parametrize(
    ("tasks", "changes", "flag", "told"),
    [
        ({"mth.temperature": 0.5}, {}, "--tasks.mth", "there are math, chat, open_code, held_out"),
        (QUOTAS | {"held_out.quota": 1}, {}, "--tasks.held_out", "there are math, chat, open_code"),
        (
            {"math.quota": 4, "chat.quota": 2},
            {},
            "--tasks.open_code.quota",
            "1 prompt with the datasource open_code would never be sampled",
        ),
        (
            {"math.reward": "http://own/reward", "chat.reward": "http://own/reward"},
            {"reward.remote_url": None},
            "--tasks.open_code.reward",
            "1 prompt with the datasource open_code have no reward source",
        ),
        (  # a teacher trains on samples without rewards, and scores none
            {f"{name}.reward": "http://own/reward" for name in ("math", "chat", "open_code")},
            {"reward.remote_url": None, "teacher.model_name_or_path": "of the policy"},
            "--tasks.held_out.reward",
            "1 prompt with the datasource held_out have no reward source",
        ),
    ],
)
def test_a_source_without_a_task_and_a_task_without_prompts_are_named(
    model_folder, tmp_path, tasks, changes, flag, told
):
    changes = {k: str(model_folder) if k.startswith("teacher") else v for k, v in changes.items()}
    with pytest.raises(UsageError) as refused_:
        build_prompt_datasets(task_config(model_folder, tmp_path, tasks, **changes))
    assert refused_.value.flag == flag and told in refused_.value.text


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [4, 4, 2]),
        ({"data.curriculum": "difficulty"}, [4, 4]),
        ({"data.curriculum": "difficulty", "train.num_episodes": 2}, [4] * 5),
        ({"tasks.a.quota": 4, "train.max_steps": 1}, [4]),
        ({"tasks.a.quota": 12, "rollout.batch_size": 12}, [12]),
    ],
)
def test_steps_with_quotas_or_a_curriculum_are_complete(changes, steps):
    """A run of ten prompts."""
    assert prompts_of_steps(with_values(PPOConfig(), {"rollout.batch_size": 4} | changes), 10) == steps


def make_sampler(size=10, **options):
    prompts = PromptDataset([Prompt(prompt_id=i, text=f"prompt {i}") for i in range(size)])
    return PromptSampler(prompts, **({"seed": 3} | options))


def ids(batch):
    return [(prompt.epoch, prompt.prompt_id) for prompt in batch]


def test_each_prompt_once_in_an_epoch_and_the_last_batch_is_short():
    sampler = make_sampler(num_epochs=2)
    batches = [sampler.next_batch(4) for _ in range(7)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 0]
    assert sampler.next_batch(1) == []
    epochs = [ids(chain(*batches[:3])), ids(chain(*batches[3:6]))]
    assert sorted(epochs[0]) == [(0, i) for i in range(10)]
    assert sorted(epochs[1]) == [(1, i) for i in range(10)]
    assert [i for _, i in epochs[0]] != [i for _, i in epochs[1]]


def test_a_batch_that_ends_with_the_epoch_is_not_followed_by_an_empty_one():
    sampler = make_sampler(num_epochs=2)
    assert [len(sampler.next_batch(5)) for _ in range(5)] == [5, 5, 5, 5, 0]


def test_the_order_depends_on_seed_and_epoch_alone():
    one, other = make_sampler(), make_sampler()
    in_threes = ids(chain(*(one.next_batch(3) for _ in range(4))))
    in_fives = ids(chain(*(other.next_batch(5) for _ in range(2))))
    assert in_threes == in_fives
    assert ids(make_sampler(seed=4).next_batch(10)) != ids(make_sampler().next_batch(10))


@pytest.mark.parametrize("consumed", range(12))
def test_a_resumed_sampler_continues_exactly(consumed):
    whole = make_sampler(num_epochs=3)
    for _ in range(consumed):
        whole.next_batch(4)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = make_sampler(num_epochs=3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == whole.state_dict()
    for _ in range(12 - consumed):
        assert ids(resumed.next_batch(4)) == ids(whole.next_batch(4))


def test_a_checkpoint_that_calls_epochs_episodes_is_read():
    whole, resumed = make_sampler(num_epochs=3), make_sampler(num_epochs=3)
    whole.next_batch(4)
    state = whole.state_dict()
    resumed.load_state_dict({"episode": state.pop("epoch"), **state})
    assert ids(resumed.next_batch(4)) == ids(whole.next_batch(4))


@pytest.mark.parametrize(("changes", "key"), [({"seed": 4}, "seed"), ({"size": 9}, "num_prompts")])
def test_resuming_with_other_prompts_is_refused(changes, key):
    state = make_sampler().state_dict()
    with refused(ErrorCode.OTHER_RUN, told=f"{key} was"):
        make_sampler(**changes).load_state_dict(state)


def test_repeated_prompts_are_counted():
    texts = ["a", "b", "a", "a", "c"]
    prompts = [Prompt(prompt_id=i, text=text, label=str(i)) for i, text in enumerate(texts)]
    assert PromptDataset(prompts).num_repeated() == 2


def test_resuming_with_changed_texts_is_refused():
    state = make_sampler().state_dict()
    changed = PromptDataset([Prompt(prompt_id=i, text=f"Prompt {i}") for i in range(10)])
    with refused(ErrorCode.OTHER_RUN, told="fingerprint was"):
        PromptSampler(changed, seed=3).load_state_dict(state)


@pytest.mark.parametrize("in_memory", [0, 100, 10**6])
def test_many_prompts_are_made_of_their_rows_again(tokenizer, monkeypatch, in_memory):
    monkeypatch.setattr("openrlhf.data.prompts.IN_MEMORY", in_memory)
    rows = [{"input": f"prompt {i}", "answer": i} for i in range(20)]
    prompts = build(rows, tokenizer, label_key="answer", first_id=5, apply_chat_template=False)
    expected = [
        Prompt(prompt_id=5 + i, text=text, label=i, num_tokens=len(tokenizer(text)["input_ids"]))
        for i, text in enumerate(f"prompt {i}" for i in range(20))
    ]
    assert list(prompts) == list(prompts.without_images) == expected
    assert prompts.without_images[-2:] == expected[-2:]
    read = json.dumps([[p.prompt_id, p.text, p.label, p.source] for p in expected])
    assert prompts.digest() == hashlib.sha256(read.encode()).hexdigest()
    assert prompts.fingerprint() == zlib.crc32("".join(p.text for p in expected).encode())


def test_columns_are_named_by_flags_of_the_command():
    columns = prompt_columns(PPOConfig()) | pretrain_column(PPOConfig())
    assert columns.keys() < {f"--{key}" for key in list_flags(PPOConfig)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: setattr(t, "eos_token", None), "no token ends a response"),
        (
            lambda t: setattr(t, "chat_template", t.chat_template.replace("<|end|>", "<|endoftext|>")),
            "the chat template ends an answer with '<|endoftext|>'",
        ),
        (lambda t: None, ""),
    ],
)
def test_a_policy_that_no_token_ends_is_told_before_it_runs(tmp_path, change, told, capsys):
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).config.save_pretrained(tmp_path / "model")
    rows = write(tmp_path / "rows.jsonl", [{"input": "hi"}])
    data = PromptDataConfig(prompt_dataset=rows, max_len=64, apply_chat_template=True)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(tmp_path / "model")), data=data)
    build_data(config)
    said = capsys.readouterr().err
    assert said.count("warning: ") == bool(told) and told in said
    stopped = replace(config, rollout=replace(config.rollout, stop=("\n",)))
    build_data(stopped)
    assert "warning" not in capsys.readouterr().err


def test_the_chat_template_of_the_flag_is_that_of_prompts_and_of_the_exported_tokenizer(tmp_path):
    tiny_chat_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1"}\n')
    template = "{% for message in messages %}Q: {{ message['content'] }} A:{% endfor %}"
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=str(tmp_path / "model")),
        data=PromptDataConfig(
            prompt_dataset=str(tmp_path / "prompts.jsonl"),
            apply_chat_template=True,
            tokenizer_chat_template=template,
            max_len=64,
        ),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo")),
    )
    prompts, _, tokenizer = build_prompt_datasets(config)
    assert prompts[0].text == "Q: 1 + 1 A:"
    assert tokenizer.chat_template == load_run_tokenizer(config).chat_template == template
