"""What reward models read of a trajectory, and what their scores make of it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from openrlhf.models.scorer import check_reward_model, load_scorer
from openrlhf.rollout.reward_model import RewardReader, add_model_rewards, short_names
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Sample, Trajectory

PROMPT, ANSWER = "<|user|>How many?<|end|><|assistant|>", "3 apples"


def sample(tokenizer, prompt: str, answer: str) -> Sample:
    prompt_ids, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    mask = [False] * len(prompt_ids) + [True] * len(ids)
    return Sample(token_ids=torch.tensor(prompt_ids + ids), action_mask=torch.tensor(mask))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are characters and [EOS]."""
    vocabulary = {c: i for i, c in enumerate(sorted(set(PROMPT + ANSWER)))} | {"[EOS]": 99}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[EOS]"))
    backend.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")


def test_the_sampled_tokens_are_read_where_the_vocabulary_is_the_same():
    tokenizer = tiny_tokenizer()
    finished, cut = sample(tokenizer, PROMPT, ANSWER + "<|end|>"), sample(tokenizer, PROMPT, ANSWER)
    read = RewardReader(tokenizer, tiny_tokenizer(), None)
    assert read(finished).token_ids.tolist() == finished.token_ids.tolist()
    assert read(cut).token_ids.tolist() == finished.token_ids.tolist()  # as the model was trained
    assert read(cut).action_mask.nonzero().tolist() == [[cut.length]]


def test_another_vocabulary_reads_the_text():
    policy, own = tiny_tokenizer(), letters()
    read = RewardReader(policy, own, None)
    for answer in (ANSWER + "<|end|>", ANSWER):
        ids = read(sample(policy, PROMPT, answer)).token_ids.tolist()
        assert "".join(own.convert_ids_to_tokens(ids)) == PROMPT + ANSWER + "[EOS]"


def test_a_long_text_is_cut_before_its_end():
    policy = tiny_tokenizer()
    whole = RewardReader(policy, policy, None)(sample(policy, PROMPT, ANSWER)).token_ids.tolist()
    cut = RewardReader(policy, policy, 6)(sample(policy, PROMPT, ANSWER)).token_ids.tolist()
    assert cut == [*whole[:5], policy.eos_token_id]


def trajectory(reward: float | None, score: float | None = None) -> Trajectory:
    return Trajectory(
        prompt=Prompt(prompt_id=0, text=PROMPT),
        sample_index=0,
        token_ids=[1, 2],
        action_mask=[False, True],
        rollout_log_probs=[-1.0],
        weight_versions=[0],
        reward=reward,
        score=reward if score is None else score,
        outcome=Outcome.REWARD_ERROR if reward is None else Outcome.OK,
        extra_logs={"steps": 2.0},
    )


def test_scores_are_weighted_and_added():
    both = [trajectory(0.0), trajectory(None), trajectory(0.0)]
    scores = [torch.tensor([1.0, 4.0]), torch.tensor([-1.0, 2.0])]
    first, failed, last = add_model_rewards(
        both, scores, names=["helpful", "harmless"], weights=[1.0, 0.5], has_function=False
    )
    assert (first.reward, first.score) == (3, 3)
    assert (last.reward, last.score) == (0, 0)
    assert failed is both[1]
    assert first.extra_logs == {"steps": 2, "reward_model/helpful": 1, "reward_model/harmless": 4}


def test_a_reward_function_keeps_the_last_word_on_the_score():
    (t,) = add_model_rewards(
        [trajectory(1.0, score=0.25)], [torch.tensor([2.0])], names=["rm"], weights=[0.5], has_function=True
    )
    assert (t.reward, t.score) == (2, 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_a_failed_reward(value):
    (t,) = add_model_rewards(
        [trajectory(1.0)],
        [torch.tensor([0.0, value])],
        names=["a", "b"],
        weights=[1.0, 1.0],
        has_function=True,
    )
    assert t.outcome is Outcome.REWARD_ERROR and t.reward is None and t.score is None
    assert t.error == f"reward model b says {value}"


def test_short_names():
    assert short_names(["models/helpful/", "harmless"]) == ["helpful", "harmless"]
    assert short_names(["a/rm", "b/rm", "c/other"]) == ["rm_0", "rm_1", "other_2"]


def test_a_model_without_a_head_is_refused_before_it_is_loaded(tmp_path: Path):
    plain = tiny_chat_model(tmp_path / "plain", seed=0)
    with pytest.raises(ValueError, match=r"--reward\.model_name_or_path .*plain: it has no scalar head"):
        check_reward_model(str(plain), "--reward.model_name_or_path", "score")
    for prefix in ("score", "v_head"):
        model = load_scorer(str(plain), flag="", dtype="fp32", attention="auto", head_prefix=prefix)
        model.model.save_pretrained(tmp_path / prefix)
        check_reward_model(str(tmp_path / prefix), "--reward.model_name_or_path", "score")
