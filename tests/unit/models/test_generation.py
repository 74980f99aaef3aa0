"""Sampling by transformers: every row of a batch is sampled independently."""

import threading
from contextlib import closing

import pytest
import torch
from transformers import GenerationConfig

from openrlhf.completions import SamplingParams
from openrlhf.models.generation import Sampling, generate
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.tools.serve.interactive_chat import PiecewiseText, TransformersStream

TOKENIZER = tiny_tokenizer()
MODEL = tiny_model(TOKENIZER).eval()
EOS = TOKENIZER.eos_token_id
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 80, 90], [11]]


@pytest.fixture(autouse=True)
def one_thread():
    """Runs on one thread: more threads only wait for each other on a model of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "stop_token_ids": [EOS]} | changes)


def answers(prompts, seeds, **changes) -> list[list[int]]:
    made = generate(MODEL, prompts, seeds, params(**changes), pad_token_id=TOKENIZER.pad_token_id)
    return [answer.token_ids for answer in made]


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.7, "temperature": 0.8, "repetition_penalty": 1.3}])
def test_an_answer_does_not_depend_on_its_batch(changes):
    together = answers(PROMPTS, [1, 2, 3], **changes)
    assert together == [answers([p], [s], **changes)[0] for p, s in zip(PROMPTS, [1, 2, 3], strict=True)]
    assert together == answers(PROMPTS[::-1], [3, 2, 1], **changes)[::-1]
    assert together != answers(PROMPTS, [4, 5, 6], **changes)


def sampling(logits: list[float], input_ids=((0,),), mask=((True,),), seeds=(0,), **changes) -> torch.Tensor:
    processor = Sampling(params(**changes), torch.tensor(mask), seeds)
    scores = torch.tensor([logits]).repeat(len(input_ids), 1)
    return processor(torch.tensor(input_ids), scores)


def test_draws_follow_the_tempered_distribution():
    logits, count = [0.0, 1.0, 2.0, -1.0], 20_000
    expected = torch.softmax(torch.tensor(logits) / 0.7, dim=0)
    ids = torch.zeros(count, 1, dtype=torch.int64).tolist()
    scores = sampling(logits, ids, [[True]] * count, range(count), temperature=0.7)
    frequencies = torch.bincount(scores.argmax(-1), minlength=4) / count
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)  # four standard deviations


def test_top_p_leaves_the_most_likely_tokens():
    """The probabilities are 0.5, 0.3, 0.15, 0.05: two make 0.8, and a third is needed for 0.85."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    for top_p, left in ((0.45, 1), (0.79, 2), (0.85, 3), (1.0, 4)):
        assert sampling(logits, top_p=top_p).isfinite().sum() == left


def test_top_p_looks_at_tempered_probabilities():
    """At temperature 2 the probabilities 0.5, 0.3, 0.15, 0.05 become 0.38, 0.29, 0.21, 0.12: three make
    0.79."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert sampling(logits, top_p=0.79, temperature=2.0).isfinite().sum() == 3


def test_greedy_scores_are_the_logits():
    assert sampling([0.5, -1.0], temperature=0.0).tolist() == [[0.5, -1.0]]


def test_repeated_tokens_are_penalised_and_padding_is_not():
    """Tokens 1 (prompt) and 2 (answer) occurred; 0 is only padding."""
    scores = sampling(
        [4.0, 4.0, -4.0, 1.0], [[0, 1, 2]], [[False, True]], temperature=0.0, repetition_penalty=2.0
    )
    assert scores.tolist() == [[4.0, 2.0, -8.0, 1.0]]


def test_an_answer_ends_with_the_first_stop_token():
    (whole,) = answers(PROMPTS[:1], [0], temperature=0.0, stop_token_ids=[])
    stop = whole[3]
    made = generate(
        MODEL,
        PROMPTS[:2],
        [0, 0],
        params(temperature=0.0, stop_token_ids=[stop]),
        pad_token_id=TOKENIZER.pad_token_id,
    )
    assert made[0].token_ids == whole[: whole.index(stop) + 1] and made[0].finish_reason == "stop"
    if stop not in made[1].token_ids:
        assert made[1].finish_reason == "length" and len(made[1].token_ids) == 8


def test_what_the_model_folder_recommends_is_not_applied():
    plain = answers(PROMPTS, [0, 0, 0], temperature=0.0)
    MODEL.generation_config = GenerationConfig(repetition_penalty=50.0, do_sample=True, temperature=9.0)
    assert answers(PROMPTS, [0, 0, 0], temperature=0.0) == plain


def test_a_stream_gives_the_same_tokens_and_can_be_left():
    long = params(max_tokens=40, stop_token_ids=[])
    stream = TransformersStream(MODEL, TOKENIZER.pad_token_id)
    whole = list(stream.stream(PROMPTS[1], 7, long))
    assert [whole] == answers([PROMPTS[1]], [7], max_tokens=40, stop_token_ids=[])
    with closing(stream.stream(PROMPTS[1], 7, long)) as tokens:  # pyrefly: ignore[bad-specialization]
        assert [next(tokens) for _ in range(2)] == whole[:2]
    assert not [thread for thread in threading.enumerate() if thread.name == "answer"]


def test_an_error_in_the_model_reaches_the_reader():
    with pytest.raises(IndexError):
        list(TransformersStream(MODEL, 0).stream([10**6], 0, params()))


def test_characters_are_given_out_whole():
    text = "3 figs 🍋 and ä"
    pieces = PiecewiseText(TOKENIZER)
    given = [pieces.add(token) for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    assert "".join(given) == text and pieces.finish() == ""
    assert "" in given and not any("\ufffd" in piece for piece in given)


def test_half_a_character_is_given_out_at_the_end():
    pieces = PiecewiseText(TOKENIZER)
    first = TOKENIZER("🍋", add_special_tokens=False)["input_ids"][0]
    assert pieces.add(first) == "" and pieces.finish() == "\ufffd" == pieces.text
