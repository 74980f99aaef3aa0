"""Reward models: the text that they read of a trajectory, and the use of their scores."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import records
from refusals import refused
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers_of_users import llama_2_style
from transformers import PreTrainedTokenizerFast

from openrlhf.cluster.rank_groups import RewardRanks
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import AlgoConfig, PPOConfig, RewardConfig
from openrlhf.data.prompts import build_prompts
from openrlhf.data.sources import Rows
from openrlhf.errors import ErrorCode
from openrlhf.models.scorer import check_reward_model, load_scorer
from openrlhf.observability.rollout_metrics import rollout_metrics
from openrlhf.rewards.models import (
    RewardReader,
    add_model_rewards,
    check_conversations,
    read_by_models,
    short_names,
)
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.training.advantages import step_view
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.types import Batch, Image, Outcome, Prompt, PromptGroup, Trajectory
from openrlhf.utils import decode

PROMPT, ANSWER = "<|user|>How many?<|end|><|assistant|>", "3 apples"
MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
PEOPLE = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
"""Chat template without special tokens."""


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled(
    tokenizer, answer: str, prompt: str = PROMPT, messages=None, truncated: bool = False
) -> Trajectory:
    """Returns a finished trajectory of these texts."""
    prompt_ids, ids = ids_of(tokenizer, prompt), ids_of(tokenizer, answer)
    return records.trajectory(
        0.0,
        prompt=Prompt(prompt_id=0, text=prompt, messages=messages),
        token_ids=prompt_ids + ids,
        action_mask=[False] * len(prompt_ids) + [True] * len(ids),
        truncated=truncated,
    )


def letters(template: str | None = None) -> PreTrainedTokenizerFast:
    """Makes a tokenizer whose tokens are characters and [EOS]."""
    vocabulary = {chr(i): i for i in range(10, 127)} | {"[EOS]": 200}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[EOS]"))
    backend.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")
    tokenizer.chat_template = template
    return tokenizer


def reader(policy, own, max_len: int | None = None) -> RewardReader:
    return RewardReader(policy, own, stop_token_ids=[policy.eos_token_id], max_len=max_len)


def read_text(policy, own, t: Trajectory) -> str:
    """Returns the text that the reward model reads; its one action must be the last token."""
    sample = reader(policy, own)(t)
    assert sample.action_mask.nonzero().tolist() == [[sample.length - 1]]
    return "".join(own.convert_ids_to_tokens(sample.token_ids.tolist()))


def test_the_sampled_tokens_are_read_where_vocabulary_and_template_are_the_same():
    tokenizer = tiny_tokenizer()
    for messages in (None, MESSAGES):
        finished = sampled(tokenizer, ANSWER + "<|end|>", messages=messages)
        sample = reader(tokenizer, tiny_tokenizer())(finished)
        assert sample.token_ids.tolist() == finished.token_ids.tolist()
    other_end = reader(tokenizer, tiny_tokenizer())(sampled(tokenizer, ANSWER))
    assert other_end.token_ids.tolist() == finished.token_ids.tolist()  # as in the model's training


@pytest.mark.parametrize("own", ["the policy's", "letters", "letters in a chat"])
def test_a_response_that_ran_out_of_tokens_has_no_end(own):
    """The policy wrote no end, so the reward model reads none."""
    policy = tiny_tokenizer()
    cut = sampled(policy, ANSWER, messages=MESSAGES, truncated=True)
    if own == "the policy's":
        sample = reader(policy, tiny_tokenizer())(cut)
        assert sample.token_ids.tolist() == cut.token_ids.tolist()
        assert sample.action_mask.nonzero().tolist() == [[sample.length - 1]]
        short = reader(policy, tiny_tokenizer(), max_len=6)(cut)
        assert short.token_ids.tolist() == cut.token_ids[:6].tolist()
    elif own == "letters":
        assert read_text(policy, letters(), cut) == PROMPT + ANSWER
    else:
        text = read_text(policy, letters(PEOPLE), cut)
        assert text == "SYSTEM: Count.\nUSER: How many?\nASSISTANT: 3 apples"


def test_another_vocabulary_without_a_template_reads_the_text():
    policy = tiny_tokenizer()
    for answer in (ANSWER + "<|end|>", ANSWER):
        assert read_text(policy, letters(), sampled(policy, answer)) == PROMPT + ANSWER + "[EOS]"
    spoken = sampled(policy, ANSWER + "<|end|>", messages=MESSAGES)
    assert read_text(policy, letters(), spoken) == PROMPT + ANSWER + "[EOS]"


def test_another_template_reads_the_conversation_and_none_of_the_policys_markup():
    policy = tiny_tokenizer()
    shown = "SYSTEM: Count.\nUSER: How many?\nASSISTANT: 3 apples\n"
    finished = sampled(policy, ANSWER + "<|end|>", messages=MESSAGES)
    own = letters(PEOPLE)
    assert read_text(policy, own, finished) == shown.rstrip("\n") + "[EOS]"
    talk = [*MESSAGES, {"role": "assistant", "content": ANSWER}]
    assert own.apply_chat_template(talk, tokenize=False) == shown
    same_words = tiny_tokenizer()
    same_words.chat_template = PEOPLE  # the vocabulary of the policy, but trained on other conversations
    sample = reader(policy, same_words)(finished)
    assert decode(same_words, sample.token_ids.tolist()) == shown.rstrip("\n") + "<|end|>"


def turns(*texts: str, truncated: bool = False) -> Trajectory:
    """Returns an episode of these texts: the prompt, then in turn answers and feedback."""
    policy, ids, mask = tiny_tokenizer(), [], []
    for i, text in enumerate(texts):
        ids += ids_of(policy, text)
        mask += [i % 2 == 1] * (len(ids) - len(mask))
    prompt = Prompt(prompt_id=0, text=PROMPT, messages=MESSAGES)
    return records.trajectory(prompt=prompt, token_ids=ids, action_mask=mask, truncated=truncated)


@pytest.mark.parametrize(
    ("answer", "feedback", "shown"),
    [
        (
            ANSWER + "<|end|>",
            "<|user|>Wrong. Again:<|end|><|assistant|>",
            "\nUSER: Wrong. Again:\nASSISTANT: ",
        ),
        (ANSWER, "<|end|>\n<|user|> Wrong.\n<|end|><|assistant|>", "\nUSER: Wrong.\nASSISTANT: "),
        (ANSWER + "<|end|>", "<|tool|>3<|end|><|assistant|>", "\nTOOL: 3\nASSISTANT: "),
        (ANSWER, " No. Again: ", " No. Again: "),
        (ANSWER + "<|end|>", "Wrong.<|user|>", "<|end|>Wrong.<|user|>"),  # no message of the template
    ],
)
def test_feedback_in_the_policys_markup_is_a_message_of_another_template(answer, feedback, shown, caplog):
    whole = f"SYSTEM: Count.\nUSER: How many?\nASSISTANT: {ANSWER}{shown}4 apples"
    assert read_text(
        tiny_tokenizer(), letters(PEOPLE), turns(PROMPT, answer, feedback, "4 apples<|end|>")
    ) == (whole + "[EOS]")
    cut = turns(PROMPT, answer, feedback, "4 apples", truncated=True)
    assert read_text(tiny_tokenizer(), letters(PEOPLE), cut) == whole
    assert ("policy's markup" in caplog.text) == ("<|" in shown)


def test_tools_results_are_the_users_where_a_template_has_no_tools():
    people = PEOPLE.replace(
        "{{ m.role", "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.role"
    )
    t = turns(PROMPT, ANSWER + "<|end|>", "<|tool|>3<|end|><|assistant|>", "3<|end|>")
    assert read_text(tiny_tokenizer(), letters(people), t).endswith("apples\nUSER: 3\nASSISTANT: 3[EOS]")


def test_another_vocabulary_reads_the_prompt_that_an_agent_wrote():
    t = turns(PROMPT.replace("How", "So, how"), ANSWER + "<|end|>")
    assert read_text(tiny_tokenizer(), letters(), t) == PROMPT.replace("How", "So, how") + ANSWER + "[EOS]"


@pytest.mark.parametrize("content", ["I count", [{"type": "text", "text": "I count"}]])
def test_an_answer_that_continues_the_assistant_is_one_message_with_it(content):
    policy, begun = tiny_tokenizer(), {"role": "assistant", "content": content}
    t = sampled(policy, " 3 apples<|end|>", PROMPT + "I count", messages=[*MESSAGES, begun])
    shown = "SYSTEM: Count.\nUSER: How many?\nASSISTANT: I count 3 apples[EOS]"
    assert read_text(policy, letters(PEOPLE), t) == shown
    check_conversations([t.prompt], letters(PEOPLE), "rm")


def test_a_policy_that_writes_a_space_first_is_read_without_it():
    """Llama 2's template has one between its markup and an answer."""
    policy = llama_2_style()
    prompt = "[INST] How many? [/INST]"
    t = sampled(policy, "", prompt, messages=MESSAGES[1:])
    token_ids = [*ids_of(policy, f"{prompt} {ANSWER}"), policy.eos_token_id]
    mask = [i >= len(t.token_ids) for i in range(len(token_ids))]
    t = records.trajectory(prompt=t.prompt, token_ids=token_ids, action_mask=mask)
    assert read_text(policy, letters(PEOPLE), t) == "USER: How many?\nASSISTANT: 3 apples[EOS]"
    assert read_text(policy, letters(), t) == f"{prompt} {ANSWER}[EOS]"


def test_without_messages_there_is_no_conversation_to_show():
    policy = tiny_tokenizer()
    assert read_text(policy, letters(PEOPLE), sampled(policy, ANSWER)) == PROMPT + ANSWER + "[EOS]"


def test_prompts_come_with_their_conversation():
    policy = tiny_tokenizer()
    rows = Rows.of([{"input": MESSAGES}, {"input": "How many?"}])
    options = {"input_key": "input", "label_key": None, "input_template": None, "max_len": 99}
    chat, text = build_prompts(rows, policy, apply_chat_template=True, **options)
    assert (chat.messages, text.messages) == (MESSAGES, MESSAGES[1:])
    (plain,) = build_prompts(Rows.of([{"input": "Hi"}]), policy, apply_chat_template=False, **options)
    assert plain.messages is None


def test_a_template_that_refuses_the_prompts_is_told_before_the_run():
    own = letters(
        PEOPLE.replace(
            "{% for",
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for",
        )
    )
    prompts = [Prompt(prompt_id=0, text="", messages=MESSAGES[1:]), Prompt(prompt_id=1, text="")]
    check_conversations(prompts, own, "rm")
    with refused(ErrorCode.CHAT_TEMPLATE, flag="--reward.model_name_or_path", value="rm") as error:
        check_conversations([*prompts, Prompt(prompt_id=2, text="", messages=MESSAGES)], own, "rm")
    assert "system, user" in error.value.text and "no system" in error.value.text


def test_a_long_text_is_cut_before_its_end():
    policy = tiny_tokenizer()
    whole = reader(policy, policy)(sampled(policy, ANSWER)).token_ids.tolist()
    cut = reader(policy, policy, max_len=6)(sampled(policy, ANSWER)).token_ids.tolist()
    assert cut == [*whole[:5], policy.eos_token_id]


def test_prompts_of_older_checkpoints_are_read():
    state = [5, "text", "label", "source", 2]  # state without a conversation
    old = Prompt.__new__(Prompt)
    old.__setstate__(state)
    assert old == Prompt(prompt_id=5, text="text", label="label", source="source", epoch=2)
    new = Prompt(prompt_id=5, text="text", messages=MESSAGES)
    assert pickle.loads(pickle.dumps(old)) == old and pickle.loads(pickle.dumps(new)) == new


def trajectory(reward: float | None, score: float | None = None) -> Trajectory:
    options = {"text": PROMPT, "extra_logs": {"steps": 2.0}}
    return records.trajectory(reward, score=reward if score is None else score, **options)


def test_scores_are_weighted_and_added():
    both = [replace(trajectory(r), sample_index=i) for i, r in enumerate((0.0, None, 0.0))]
    scores = [np.array([1.0, 4.0]), np.array([-1.0, 2.0])]
    first, failed, last = add_model_rewards(
        both, scores, names=["helpful", "harmless"], weights=[1.0, 0.5], has_function=False
    )
    assert (first.reward, first.score) == (3, 3)
    assert (last.reward, last.score) == (0, 0)
    assert failed is both[1]
    assert first.extra_logs == {"steps": 2, "reward_model/helpful": 1, "reward_model/harmless": 4}


def test_a_reward_function_keeps_the_last_word_on_the_score():
    (t,) = add_model_rewards(
        [trajectory(1.0, score=0.25)], [np.array([2.0])], names=["rm"], weights=[0.5], has_function=True
    )
    assert (t.reward, t.score) == (2, 0.25)


@pytest.mark.parametrize(("source", "score"), [("math", 0.25), ("chat", 1.25)])
def test_a_task_with_a_function_of_its_own_keeps_its_scores(source, score):
    own = {"tasks.math.reward": "http://own/reward", "reward.model_weights": (0.5,)}
    ranks = SimpleNamespace(config=with_values(PPOConfig(), own | {"reward.model_name_or_path": "rm"}))
    sample = trajectory(1.0, score=0.25)
    group = PromptGroup(prompt=replace(sample.prompt, source=source), trajectories=[sample])
    (t,) = RewardRanks._add(ranks, group, iter([np.array([2.0])])).trajectories
    assert (t.reward, t.score) == (2, score)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_a_failed_reward(value):
    (t,) = add_model_rewards(
        [trajectory(1.0)], [np.array([0.0, value])], names=["a", "b"], weights=[1.0, 1.0], has_function=True
    )
    assert t.outcome is Outcome.REWARD_ERROR and t.reward is None and t.score is None
    assert t.error.startswith("reward model b ") and t.error.endswith(f" {value}")


def episodes_of_two_parts() -> list[Trajectory]:
    """Returns two episodes of one prompt, whose agent has rewritten its history."""
    return [
        replace(trajectory(0.5), sample_index=sample, part=part, extra_logs={})
        for sample in (0, 1)
        for part in (0, 1)
    ]


def test_an_episode_of_several_sequences_has_one_reward():
    """The reward is 0.5 and the score of its last sequence, wherever a reward is looked at."""
    parts = episodes_of_two_parts()
    assert read_by_models(parts) == [parts[1], parts[3]]
    scored = add_model_rewards(
        parts, [np.array([2.0]), np.array([-1.0])], names=["rm"], weights=[2.0], has_function=False
    )
    assert [(t.reward, t.score) for t in scored] == [(4.5, 4.5), (4.5, 4.5), (-1.5, -1.5), (-1.5, -1.5)]
    options = {"algo": AlgoConfig(), "reward": RewardConfig(), "max_new_tokens": 8}
    trained_on = step_view(Batch.of(scored), scored, **options)
    assert trained_on.rewards.tolist() == trained_on.named_rewards["score"].tolist() == [4.5, -1.5]
    assert rollout_metrics(scored, 0)["rollout/reward_mean"] == 1.5
    assert rollout_metrics(scored, 0)["rollout/reward_model/rm"] == 0.5
    assert evaluation_metrics(scored)["eval/default_score_mean"] == 1.5


def test_a_score_that_is_not_finite_fails_the_whole_episode():
    scored = add_model_rewards(
        episodes_of_two_parts(),
        [np.array([np.nan]), np.array([1.0])],
        names=["rm"],
        weights=[1.0],
        has_function=False,
    )
    assert [t.ok for t in scored] == [False, False, True, True]
    assert all(t.outcome is Outcome.REWARD_ERROR and "reward model rm " in t.error for t in scored[:2])
    assert read_by_models(scored) == [scored[3]]


def test_short_names():
    assert short_names(["models/helpful/", "harmless"]) == ["helpful", "harmless"]
    assert short_names(["a/rm", "b/rm", "c/other"]) == ["rm_0", "rm_1", "other_2"]


def test_a_model_without_a_head_is_refused_before_it_is_loaded(tmp_path: Path):
    plain = tiny_chat_model(tmp_path / "plain", seed=0)
    with refused(ErrorCode.INVALID_MODEL, flag="--reward.model_name_or_path", value=plain):
        check_reward_model(str(plain), "--reward.model_name_or_path", "score")
    for prefix in ("score", "v_head"):
        model = load_scorer(str(plain), flag="", dtype="fp32", attention="auto", head_prefix=prefix)
        model.model.save_pretrained(tmp_path / prefix)
        check_reward_model(str(tmp_path / prefix), "--reward.model_name_or_path", "score")


@pytest.mark.parametrize("truncated", [False, True])
def test_images_are_read_where_the_policy_read_them(truncated: bool) -> None:
    tokenizer, images = tiny_tokenizer(), (Image("a.png", b"a"),)
    t = replace(sampled(tokenizer, ANSWER, truncated=truncated), images=images)
    sample = reader(tokenizer, tokenizer)(t)
    assert sample.images == images and sample.token_ids.tolist()[: len(t.token_ids)] == t.token_ids.tolist()
